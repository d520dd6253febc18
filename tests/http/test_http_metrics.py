"""/metrics: parses, and says what the state says."""

import asyncio
from typing import Any

from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from blitzd.events import types as ev
from tests.control.harness import Harness
from tests.http.scripted_node import FOREVER, ScriptedNode, say
from tests.http.served import Served, chat_body, eventually, post, served


def scrape(server: Served) -> dict[str, Any]:
    """{sample name and labels: value}, after checks that hold for every scrape."""
    answer = server.ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples: dict[str, Any] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.name.startswith("blitzd_")
        assert family.documentation
        assert family.type in ("gauge", "counter", "histogram"), family
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")
            key = f"{sample.name}{sorted(sample.labels.items())}" if sample.labels else sample.name
            assert key not in samples, f"twice: {key}"
            samples[key] = sample.value
    return samples


def by_state(samples: dict[str, Any], name: str) -> dict[str, float]:
    start = f"{name}[('state', '"
    return {
        key.removeprefix(start).rstrip("')]"): value
        for key, value in samples.items()
        if key.startswith(start)
    }


def test_gauges_are_the_state() -> None:
    node = ScriptedNode([FOREVER])
    with served(node) as server:
        idle = scrape(server)
        socks = [server.raw(post("/v1/chat/completions", chat_body())) for _ in range(3)]
        eventually(lambda: len(node.open) == 3)
        busy = scrape(server)
        for sock in socks:
            sock.close()
        eventually(lambda: not node.open)
        after = scrape(server)
    assert by_state(idle, "blitzd_requests_open")["queued"] == 0
    assert by_state(busy, "blitzd_requests_open")["queued"] == 3
    assert busy["blitzd_queue_requests"] == 3
    assert busy["blitzd_queue_tokens"] == 15
    assert busy["blitzd_replica_inflight_requests[('replica', 'p0')]"] == 3
    assert by_state(after, "blitzd_requests_open") == by_state(idle, "blitzd_requests_open")
    assert after["blitzd_queue_requests"] == 0
    assert by_state(after, "blitzd_requests_total")["cancelled"] == 3
    assert idle["blitzd_request_resumes_total[('cause', 'worker_lost')]"] == 3
    assert idle.keys() == busy.keys() == after.keys()


def test_every_request_is_in_exactly_one_end() -> None:
    node = ScriptedNode()
    with served(node) as server:
        server.chat()
        server.complete()
        node.script = say("a", finish=None)
        server.chat()
        samples = scrape(server)
    ends = by_state(samples, "blitzd_requests_total")
    assert ends == {"finished": 2, "failed": 1, "cancelled": 0, "rejected": 0}


def test_replicas_are_counted_by_state_with_zeros() -> None:
    with served(ScriptedNode()) as server:
        samples = scrape(server)
    states = by_state(samples, "blitzd_replicas")
    assert sum(states.values()) == 2
    assert (states["Prefill"], states["Decode"], states["Failed"]) == (1, 1, 0)
    assert samples["blitzd_replica_kv_blocks[('replica', 'd0')]"] == 64
    assert samples["blitzd_log_seq"] == 7
    assert samples["blitzd_ready"] == 1


def test_what_is_wanted_and_what_there_is() -> None:
    with served(ScriptedNode()) as server:
        samples = scrape(server)
    assert samples["blitzd_scale_wanted[('role', 'decode')]"] == 0
    for standing in ("ready", "loading", "dead"):
        assert (
            samples[f"blitzd_scale_replicas[('role', 'prefill'), ('standing', '{standing}')]"] == 0
        )
    for standing in ("filling", "held"):
        assert samples[f"blitzd_pool_copies[('standing', '{standing}')]"] == 0
    assert samples["blitzd_autoscale"] == samples["blitzd_scale_pinned"] == 0


def test_a_replica_state_that_the_page_does_not_know_is_counted_all_the_same() -> None:
    class Later(ScriptedNode):
        def state(self) -> dict[str, Any]:
            state = super().state()
            state["replicas"][0]["state"] = "Sleeping"
            return state

    with served(Later()) as server:
        assert by_state(scrape(server), "blitzd_replicas")["Sleeping"] == 1


def test_histograms_are_cumulative() -> None:
    node = ScriptedNode()
    for value in (0.005, 0.05, 0.05, 5.0):
        node.seen.ttft_s.observe(value)
    with served(node) as server:
        samples = scrape(server)
    buckets = [
        samples[f"blitzd_ttft_seconds_bucket[('le', '{le}')]"]
        for le in ("0.01", "0.1", "1.0", "+Inf")
    ]
    assert buckets == [1, 3, 3, 4]
    assert samples["blitzd_ttft_seconds_count"] == 4
    assert samples["blitzd_ttft_seconds_sum"] == 5.105
    for name in ("tpot", "queue", "e2e"):
        assert samples[f"blitzd_{name}_seconds_count"] == 0


def test_openmetrics_on_request() -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    with served(ScriptedNode()) as server:
        answer = server.ask("GET", "/metrics", headers=accept)
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(answer.body.decode())}
    assert {"blitzd_requests", "blitzd_replicas", "blitzd_ttft_seconds"} <= names


def test_a_node_that_cannot_tell_its_state_is_a_500_not_an_empty_page() -> None:
    class Broken(ScriptedNode):
        def state(self) -> dict[str, Any]:
            raise asyncio.InvalidStateError("no state")

    with served(Broken()) as server:
        answer = server.ask("GET", "/metrics")
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"


def test_flows_are_told_by_replica_and_by_link() -> None:
    world = Harness()
    world.topology = (ev.NodeLinks("b", ("e0",), 10**9), ev.NodeLinks("local", ("e0",), 10**9))
    world.serving("prefill")
    offered = (("b.r0", "decode"),)
    world.feed(ev.AgentJoined("b", 1, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
    world.attach("b.r0")
    world.load("b.r0")
    for request in (1, 2):
        world.arrive(request)
        world.first_token(request)
    world.imported(1)
    world.now += 1
    world.feed(ev.ImportProgressed(world.state.requests[2].lease_id, 400))

    class Moving(ScriptedNode):
        def state(self) -> dict[str, Any]:
            return super().state() | world.state.to_json()

    with served(Moving()) as server:
        samples = scrape(server)
    kv = "('carries', 'kv'), ('direction', '{}'), ('replica', '{}')"
    for replica, direction in (("r0", "out"), ("b.r0", "in")):
        labels = kv.format(direction, replica)
        assert samples[f"blitzd_replica_flow_bytes_total[{labels}]"] == 1000
        assert samples[f"blitzd_replica_flows[{labels}]"] == 1
    assert samples[f"blitzd_replica_flow_bytes_total[{kv.format('in', 'r0')}]"] == 0
    flow = "[('carries', 'kv'), ('source', 'r0'), ('target', 'b.r0')]"
    assert samples[f"blitzd_flow_bytes{flow}"] == 400
    for node, direction, count in (("local", "out", 1), ("b", "in", 1), ("b", "out", 0)):
        labels = (
            f"('carries', 'kv'), ('direction', '{direction}'), ('link', 'e0'), ('node', '{node}')"
        )
        assert samples[f"blitzd_network_link_flows[{labels}]"] == count
    assert samples["blitzd_network_link_bytes_per_second[('link', 'e0'), ('node', 'b')]"] == 10**9


def test_live_pairs_and_who_ran_which_layers() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))
    world.moved("r2")
    for request_id, layers in ((1, 7), (2, 0)):
        world.arrive(request_id)
        world.relayed(request_id, layers)

    class Paired(ScriptedNode):
        def state(self) -> dict[str, Any]:
            return super().state() | world.state.to_json()

    with served(Paired()) as server:
        samples = scrape(server)
    assert samples["blitzd_live_pairs"] == 1
    assert samples["blitzd_relays_total"] == 2
    assert samples["blitzd_relayed_layers_total[('side', 'new')]"] == 7
    assert samples["blitzd_relayed_layers_total[('side', 'old')]"] == 23 + 30
