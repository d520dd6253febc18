"""What moves between replicas, on `/metrics`: bytes and transfers, in and out of each replica,
and what is on each link."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from blitzd.http.metric_families import counters, gauges

DIRECTIONS = ("in", "out")
CARRIES = ("kv", "weights")


def flow_metrics(state: dict[str, Any]) -> Iterator[Metric]:
    yield from _of_replicas(state["replicas"])
    links: list[dict[str, Any]] = state["links"]
    yield gauges(
        "blitzd_flow_bytes",
        "Bytes that transfers under way from one replica to another have moved, as last reported",
        ["source", "target", "carries"],
        [((f["source"], f["target"], f["carries"]), f["bytes_moved"]) for f in links],
    )
    yield from _of_links(state["topology"])


def _of_replicas(replicas: list[dict[str, Any]]) -> Iterator[Metric]:
    flows = [
        ((replica["id"], direction, carries), replica["flow"][f"{carries}_{direction}"])
        for replica in replicas
        for carries in CARRIES
        for direction in DIRECTIONS
    ]
    labels = ["replica", "direction", "carries"]
    yield counters(
        "blitzd_replica_flow_bytes_total",
        "Bytes that came from other replicas (in) or went to them (out), and were of use",
        labels,
        [(values, flow["bytes"]) for values, flow in flows],
    )
    yield gauges(
        "blitzd_replica_flows",
        "Transfers under way between the replica and others",
        labels,
        [(values, flow["open"]) for values, flow in flows],
    )


def _of_links(topology: list[dict[str, Any]]) -> Iterator[Metric]:
    links = [(node, link) for node in topology for link in node["links"]]
    yield gauges(
        "blitzd_network_link_bytes_per_second",
        "What the link of a node carries each way, as the configuration says",
        ["node", "link"],
        [((node["node"], link["name"]), node["rate_bytes_s"]) for node, link in links],
    )
    yield gauges(
        "blitzd_network_link_flows",
        "Transfers under way over the link of a node, as seen from the node",
        ["node", "link", "direction", "carries"],
        [
            ((node["node"], link["name"], direction, carries), link[direction][carries])
            for node, link in links
            for direction in DIRECTIONS
            for carries in CARRIES
        ],
    )
