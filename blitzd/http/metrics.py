"""`/metrics`, read from the folded state at each scrape: nothing here counts."""

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import blitzd
from blitzd.http.flow_metrics import flow_metrics
from blitzd.http.metric_families import counters, gauge, gauges
from blitzd.node.face import HistogramData, NodeFace

REPLICA_STATES = (
    "Inactive",
    "LoadingPrefill",
    "LoadingDecode",
    "NewPrefill",
    "RefactoryPrefill",
    "OldPrefill",
    "Prefill",
    "AusPrefill",
    "Decode",
    "AusDecode",
    "MutatingToDecode",
    "ShuttingPrefill",
    "ShuttingDecode",
    "ShuttingNull",
    "Colocated",
    "Failed",
)
"""Those that always have a series: an alert on "fewer than one" needs the zero."""

END_STATES = ("finished", "failed", "cancelled", "rejected")

_REPLICA_GAUGES = (
    ("epoch", "epoch", "Incarnation of the replica's worker"),
    ("inflight_requests", "inflight", "Requests that the replica holds"),
    ("kv_blocks_used", "blocks_used", "KV blocks in use, as last reported"),
    ("kv_blocks", "blocks_total", "KV blocks that the replica has"),
    ("layers_ready", "layers_ready", "Layers whose weights are there"),
    ("layers", "layers_total", "Layers of the replica's model"),
    ("weights_loaded_bytes", "bytes_loaded", "Bytes of weights that are there"),
    ("weights_bytes", "bytes_total", "Bytes of weights of the replica's model"),
)


_NODE_COUNTERS = (
    ("stale_notices", "stale_notices", "Messages about what was over already"),
    ("link_failures", "link_faults", "Hand-overs that failed for the link's sake"),
    ("kv_mismatches", "kv_mismatches", "Hand-overs whose KV was not what the source has"),
    ("audit_failures", "audits_failed", "Times that an idle worker held what nobody needs"),
    ("invariants_broken", "invariants_broken", "Times that the state did not add up"),
    ("relays", "relays", "Prefills that the other replica of a live pair went on with"),
)


class NodeCollector(Collector):
    def __init__(self, node: NodeFace) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        state = self._node.state()
        yield from self._node_metrics(state)
        yield from _request_metrics(state)
        yield from _replica_metrics(state)
        yield from flow_metrics(state)
        yield from _plan_metrics(state["plan"])
        yield from self._latencies()

    def _node_metrics(self, state: dict[str, Any]) -> Iterator[Metric]:
        health = self._node.health()
        yield gauges(
            "blitzd_build_info", "Version of the daemon", ["version"], [((blitzd.__version__,), 1)]
        )
        yield gauges(
            "blitzd_model_info",
            "Models served here",
            ["model", "digest"],
            [((card.name, card.digest), 1) for card in self._node.models],
        )
        yield gauge("blitzd_ready", "1 when a request sent now would be served", health.ready)
        yield gauge("blitzd_draining", "1 while the daemon drains", health.draining)
        yield gauge("blitzd_log_seq", "Sequence number of the last folded event", state["seq"])

    def _latencies(self) -> Iterator[Metric]:
        seen = self._node.observations()
        yield _histogram(
            "blitzd_ttft_seconds", "Time from acceptance to the first token", seen.ttft_s
        )
        yield _histogram(
            "blitzd_tpot_seconds", "Time per output token after the first", seen.tpot_s
        )
        yield _histogram("blitzd_queue_seconds", "Time from acceptance to prefill", seen.queue_s)
        yield _histogram("blitzd_e2e_seconds", "Time from acceptance to the end", seen.e2e_s)


def _request_metrics(state: dict[str, Any]) -> Iterator[Metric]:
    counts: dict[str, int] = state["requests"]
    yield gauges(
        "blitzd_requests_open",
        "Requests that have not ended, by state",
        ["state"],
        [((name,), count) for name, count in counts.items() if name not in END_STATES],
    )
    yield counters(
        "blitzd_requests_total",
        "Requests that have ended, by how",
        ["state"],
        [((name,), counts.get(name, 0)) for name in END_STATES],
    )
    yield counters(
        "blitzd_request_resumes_total",
        "Requests that were begun anew after what they had on a replica was lost, by cause",
        ["cause"],
        [((cause,), count) for cause, count in state["resumes"].items()],
    )
    queue = state["queue"]
    yield gauge("blitzd_queue_requests", "Requests that wait for a prefill", queue["requests"])
    yield gauge("blitzd_queue_tokens", "Tokens that wait for a prefill", queue["tokens"])


def _replica_metrics(state: dict[str, Any]) -> Iterator[Metric]:
    replicas: list[dict[str, Any]] = state["replicas"]
    by_state = Counter(dict.fromkeys(REPLICA_STATES, 0))
    by_state.update(replica["state"] for replica in replicas)
    yield gauges(
        "blitzd_replicas",
        "Replicas, by state",
        ["state"],
        [((name,), count) for name, count in by_state.items()],
    )
    for name, key, documentation in _REPLICA_GAUGES:
        yield gauges(
            f"blitzd_replica_{name}",
            documentation,
            ["replica"],
            [((str(replica["id"]),), replica[key]) for replica in replicas],
        )
    yield gauges(
        "blitzd_node_up",
        "1 while the agent of another node is in contact, 0 once it is lost",
        ["node"],
        [((agent["node"],), agent["phase"] == "present") for agent in state["agents"]],
    )
    yield gauge("blitzd_links", "Links between replicas in use", len(state["links"]))
    faulty: list[dict[str, Any]] = state["faulty_links"]
    yield gauges(
        "blitzd_link_faults",
        "Hand-overs in a row that failed over the link; none when the last one succeeded",
        ["source", "target", "fault"],
        [((link["source"], link["target"], link["fault"]), link["faults"]) for link in faulty],
    )
    cooling = sum(bool(link["cool_until_ns"]) for link in faulty)
    yield gauge("blitzd_links_cooling", "Links that nothing goes over for a while", cooling)
    for name, key, documentation in _NODE_COUNTERS:
        yield CounterMetricFamily(f"blitzd_{name}", documentation, value=state["node"][key])
    yield gauge("blitzd_live_pairs", "Replicas that serve while they load", len(state["pairs"]))
    sides = ("new", "old")
    yield counters(
        "blitzd_relayed_layers_total",
        "Layers of relayed prefills, by the side of the pair that ran them",
        ["side"],
        [((side,), state["node"][f"relayed_layers_{side}"]) for side in sides],
    )


def _plan_metrics(plan: dict[str, Any]) -> Iterator[Metric]:
    roles: dict[str, dict[str, Any]] = plan["roles"]
    yield gauges(
        "blitzd_scale_wanted",
        "Replicas of the role that are wanted; 0: as configured",
        ["role"],
        [((role,), shown["wanted"]) for role, shown in roles.items()],
    )
    yield gauges(
        "blitzd_scale_replicas",
        "Replicas of the role that serve, are on the way to it, or have failed",
        ["role", "standing"],
        [
            ((role, standing), shown[standing])
            for role, shown in roles.items()
            for standing in ("ready", "loading", "dead")
        ],
    )
    yield gauge("blitzd_scale_spares", "Replicas that could be given a role", plan["spare"])
    kept = list(plan["pool"].values())
    yield gauges(
        "blitzd_pool_copies",
        "Copies of the model that a node keeps in memory for all: being filled, or held",
        ["standing"],
        [((standing,), kept.count(standing)) for standing in ("filling", "held")],
    )
    yield gauge("blitzd_autoscale", "1 while the planner decides", plan["autoscale"])
    yield gauge("blitzd_scale_pinned", "1 while an operator's counts hold", plan["pinned"])


def _histogram(name: str, documentation: str, data: HistogramData) -> Metric:
    bounds = [*(str(float(bound)) for bound in data.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(data.counts), strict=True))
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=data.total)


class Metrics:
    def __init__(self, node: NodeFace) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(NodeCollector(node))

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/metrics", self.metrics)]

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text, or OpenMetrics to a scraper that asks for it."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})
