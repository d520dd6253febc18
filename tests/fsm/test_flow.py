"""What moves: by replica and by link, from leases and loads, and summed up for ever."""

from typing import Any

from blitzd.control.core import CORE_VERSION
from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm import ClusterState, fold
from blitzd.fsm.flow import TOTALS_SINCE
from blitzd.fsm.table import LOADING
from tests.control.harness import Harness, refold

GB = 10**9
FLOWS = ("kv_in", "kv_out", "weights_in", "weights_out")


def world(*, described: bool) -> Harness:
    """A prefill here; b has a decode and two spares, all on one link."""
    made = Harness()
    if described:
        made.topology = (ev.NodeLinks("b", ("e0",), GB), ev.NodeLinks("local", ("e0", "e1"), GB))
    made.serving("prefill")
    offered = (("b.r0", "decode"), ("b.r1", "spare"), ("b.r2", "spare"))
    made.feed(ev.AgentJoined("b", 1, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
    for name, _ in offered:
        made.attach(name)
    made.load("b.r0")
    return made


def flow(made: Harness, replica: str) -> dict[str, tuple[int, int]]:
    """(bytes, open) by kind and direction, without zeros."""
    [shown] = [r for r in made.state.to_json()["replicas"] if r["id"] == replica]
    found = {name: (shown["flow"][name]["bytes"], shown["flow"][name]["open"]) for name in FLOWS}
    return {name: counts for name, counts in found.items() if any(counts)}


def links(made: Harness) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = made.state.to_json()["links"]
    return found


def test_kv_under_way_and_kv_that_has_moved() -> None:
    made = world(described=True)
    made.arrive(1)
    made.first_token(1)
    lease = made.state.requests[1].lease_id
    made.now += 1
    made.feed(ev.ImportProgressed(lease, 300))
    assert links(made) == [
        {
            "source": "r0",
            "target": "b.r0",
            "carries": "kv",
            "leases": [lease],
            "bytes_moved": 300,
            "bytes_total": 0,
            "over": ["local/e0", "b/e0"],
        }
    ]
    assert (flow(made, "r0"), flow(made, "b.r0")) == ({"kv_out": (0, 1)}, {"kv_in": (0, 1)})
    made.imported(1)
    assert links(made) == []
    assert (flow(made, "r0"), flow(made, "b.r0")) == ({"kv_out": (1000, 0)}, {"kv_in": (1000, 0)})
    assert refold(made.log).hash() == made.state.hash()


def test_a_hand_over_that_failed_has_moved_nothing() -> None:
    made = world(described=False)
    made.arrive(1)
    made.first_token(1)
    lease = made.state.requests[1].lease_id
    made.now += 1
    made.feed(ev.ImportProgressed(lease, 300))
    made.feed(ev.ImportEnded(lease, 300, 10, "stalled", "no byte came"))
    assert "kv_in" not in flow(made, "b.r0") or flow(made, "b.r0")["kv_in"][0] == 0


def load_b1(made: Harness) -> None:
    made.feed(ev.PolicyRequested((("ladder_map", 0),)))
    made.feed(ev.RoleRequested("b.r1", "decode"))


def test_weights_are_counted_from_whom_they_came_and_not_twice() -> None:
    made = world(described=False)
    load_b1(made)
    made.feed(ev.RoleRequested("b.r2", "decode"))
    made.feed(ev.LoadMoved("b.r1", 1, 10, 30, 400, 1000, "b.r0"))
    made.feed(ev.LoadMoved("b.r2", 1, 8, 30, 300, 1000, "b.r1"))
    assert flow(made, "b.r1") == {"weights_in": (400, 1), "weights_out": (300, 1)}
    # Its source dies, and the rest comes from the one before.
    made.feed(ev.WorkerExited("b.r1", 1, "killed"))
    made.feed(ev.LoadMoved("b.r2", 1, 9, 30, 350, 1000, "b.r0"))
    made.load("b.r2")
    assert flow(made, "b.r2") == {"weights_in": (1000, 0)}
    assert flow(made, "b.r0")["weights_out"] == (400 + 700, 0)
    assert flow(made, "b.r1")["weights_out"][0] == 300


def test_what_a_failed_load_has_left_is_not_counted_again() -> None:
    made = world(described=False)
    load_b1(made)
    made.feed(ev.LoadMoved("b.r1", 1, 20, 30, 600, 1000, "b.r0"))
    made.feed(ev.LoadEnded("b.r1", 1, "", "b.r0", 30, 0, 64, 0, "unavailable"))
    # It is tried again at once, and goes on.
    made.feed(ev.LoadMoved("b.r1", 1, 21, 30, 620, 1000, "b.r0"))
    made.load("b.r1")
    assert flow(made, "b.r1")["weights_in"] == (600 + 380, 0)


def test_of_a_sharded_load_each_shard_is_counted_where_it_comes_from() -> None:
    """a has a decode on each of two links; b has two spares on two links, and one beside."""
    made = Harness(ladder_map=0)
    made.topology = tuple(ev.NodeLinks(node, ("e0", "e1"), GB) for node in "ab")
    made.boot("prefill")
    for node, roles in (("a", ("decode",) * 2), ("b", ("spare",) * 3)):
        offered = tuple((f"{node}.r{i}", role) for i, role in enumerate(roles))
        made.feed(ev.AgentJoined(node, 1, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
    for replica in list(made.state.replicas):
        made.attach(replica)
    while loading := made.state.in_states(*LOADING):
        made.load(loading[0].id)
    made.feed(ev.ScaleRequested(1, 5))
    assert {made.replica(f"b.r{i}").rung for i in range(3)} == {"shard"}
    found = {(f["source"], f["target"]): f["over"] for f in links(made)}
    assert found == {
        ("a.r0", "b.r0"): ["a/e0", "b/e0"],
        ("b.r1", "b.r0"): [],
        ("a.r1", "b.r1"): ["a/e1", "b/e1"],
        ("b.r0", "b.r1"): [],
        ("b.r0", "b.r2"): [],
        ("b.r1", "b.r2"): [],
    }
    for i in range(3):
        made.load(f"b.r{i}")
    sums = {r: flow(made, r) for r in ("a.r0", "a.r1", "b.r0", "b.r2")}
    assert sums["b.r0"]["weights_in"] == sums["b.r2"]["weights_in"] == (1000, 0)
    # Each byte leaves a once, half of them by either link; beside what they gave one another.
    assert sums["a.r0"]["weights_out"][0] % 1000 == sums["a.r1"]["weights_out"][0] % 1000 == 500
    assert sums["b.r0"]["weights_out"] == (1000, 0)


def test_a_load_from_the_nodes_own_file_is_no_flow() -> None:
    made = world(described=True)
    assert flow(made, "b.r0") == flow(made, "r0") == {}


def test_flows_of_one_domain_take_up_no_link() -> None:
    made = world(described=True)
    load_b1(made)
    [shown] = links(made)
    assert (shown["source"], shown["target"], shown["over"]) == ("b.r0", "b.r1", [])
    [b, _] = made.state.to_json()["topology"]
    assert b["links"][0]["in"] == b["links"][0]["out"] == {"kv": 0, "weights": 0}


def test_links_say_what_is_on_them_each_way() -> None:
    made = world(described=True)
    made.arrive(1)
    made.first_token(1)
    b, local = made.state.to_json()["topology"]
    assert b["links"] == [
        {"name": "e0", "out": {"kv": 0, "weights": 0}, "in": {"kv": 1, "weights": 0}}
    ]
    assert local["links"][0]["out"] == {"kv": 1, "weights": 0}
    assert local["links"][1]["out"] == {"kv": 0, "weights": 0}


def test_a_log_of_before_folds_without_totals() -> None:
    """What it folded to then is in it, as hashes."""
    assert TOTALS_SINCE <= CORE_VERSION
    made = world(described=False)
    made.arrive(1)
    made.first_token(1)
    made.imported(1)
    state = ClusterState()
    for record in made.log:
        payload = record.payload
        if isinstance(payload, ev.NodeStarted):
            old = ev.NodeStarted(1, "test", "local", payload.policy, TOTALS_SINCE - 1)
            record = Record(record.seq, 0, record.mono_ns, record.cause, old)
        fold(state, record)
    assert {r.kv_in + r.kv_out for r in state.replicas.values()} == {0}
