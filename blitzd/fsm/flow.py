"""What moves between replicas: KV of open leases and weights of loads under way, how far each
has come, and over which links of the network.

All of it follows from leases and replicas. What has moved in the past is summed up in the fold
(`kv_in` and its like of a replica), since leases and loads that have ended leave nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from blitzd.events.topology_events import number_of
from blitzd.fsm.entities import Replica
from blitzd.fsm.link import Lease
from blitzd.fsm.table import LOADING

if TYPE_CHECKING:
    from blitzd.fsm.state import ClusterState

TOTALS_SINCE = 3
"""The core's version. A log of one before folds to what it folded to then, without totals."""
KINDS = ("kv", "weights")


class Flow(NamedTuple):
    source: str
    target: str
    carries: str
    """kv or weights."""
    moved: int
    """Bytes, when the target last said so."""
    total: int
    """Bytes; 0: nobody has said."""
    lease: int
    """Of KV."""


class Way(NamedTuple):
    """One direction of one link."""

    link: str
    """NODE/LINK, or a replica that has one of its own."""
    direction: str
    """out or in, as seen from the node."""


def open_flows(state: "ClusterState") -> list[Flow]:
    """In order of leases, then of the replicas that load."""
    weights = [
        Flow(giver, replica.id, "weights", moved, total, 0)
        for _, replica in _fed(state)
        for (giver, moved), (_, total) in zip(
            _shares(replica, replica.bytes_loaded),
            _shares(replica, replica.bytes_total),
            strict=True,
        )
        if giver in state.replicas
    ]
    return _kv_flows(state) + weights


def _kv_flows(state: "ClusterState") -> list[Flow]:
    return [
        Flow(source, lease.target, "kv", moved, 0, lease.id)
        for lease in state.leases.values()
        for source, moved in _parts(state, lease, lease.bytes_moved)
    ]


def _fed(state: "ClusterState") -> list[tuple[str, Replica]]:
    """(source, replica) of the loads that come from a replica."""
    loading = ((state.feeder(replica), replica) for replica in state.in_states(*LOADING))
    return [(source.id, replica) for source, replica in loading if source is not None]


def domain_of(state: "ClusterState", replica: Replica) -> str:
    """Of scale-up: what moves inside it goes over no link."""
    links = state.topology.get(replica.node)
    return replica.node if links is None else links.domain or links.node


def link_of(state: "ClusterState", replica: Replica) -> str:
    links = state.topology.get(replica.node)
    return replica.id if links is None else links.link_of(replica.id)


def links_of(state: "ClusterState", replicas: Iterable[Replica]) -> Iterator[str]:
    """The described link of each, or nothing, for thousands at a time."""
    names: dict[str, tuple[str, ...]] = {}
    for replica in replicas:
        known = names.get(replica.node)
        if known is None:
            links = state.topology.get(replica.node)
            known = names[replica.node] = links.names if links else ("",)
        yield known[number_of(replica.id) % len(known)]


def ways(state: "ClusterState", source_id: str, target_id: str) -> tuple[Way, ...]:
    """Those that what moves from one to the other takes up; none inside of a domain, or when
    one of them is gone."""
    source, target = state.replicas.get(source_id), state.replicas.get(target_id)
    if source is None or target is None or domain_of(state, source) == domain_of(state, target):
        return ()
    return Way(link_of(state, source), "out"), Way(link_of(state, target), "in")


def traffic(state: "ClusterState") -> Counter[tuple[Way, str]]:
    """How many flows of each kind are on each way that is used. What neighbours give each other
    of their shards is on none."""
    pairs = [(flow.source, flow.target, "kv") for flow in _kv_flows(state)]
    pairs += [(source, replica.id, "weights") for source, replica in _fed(state)]
    return Counter(
        (way, carries) for source, target, carries in pairs for way in ways(state, source, target)
    )


# Totals.


def kv_moved(state: "ClusterState", lease: Lease, count: int) -> None:
    _add(state, lease.target, "kv_in", count)
    for source, moved in _parts(state, lease, count):
        _add(state, source, "kv_out", moved)


def _parts(state: "ClusterState", lease: Lease, count: int) -> list[tuple[str, int]]:
    """Who gives how much of `count` bytes: of two that share the layers, each its share, since
    every layer's KV has the same size."""
    if not lease.rest:
        return [(lease.source, count)]
    layers = state.replicas[lease.target].layers_total
    first = count * lease.split_layer // layers
    return [(lease.source, first), (lease.rest, count - first)]


def weights_moved(state: "ClusterState", replica: Replica, arrived: int) -> None:
    """`arrived` of the weights are there now. What a load that failed has left is not counted
    again by the one that goes on with it."""
    came = arrived - replica.bytes_loaded
    resumed = not replica.bytes_loaded and replica.peer_failures
    if replica.peers and came > 0 and not resumed:
        _add(state, replica.id, "weights_in", came)
        for giver, count in _shares(replica, came):
            _add(state, giver, "weights_out", count)


def _shares(replica: Replica, came: int) -> list[tuple[str, int]]:
    """Who gave how much of it: each of those that bring a shard an equal part, which the
    replica itself, if it is one of them, has from its source."""
    takers = [taker for taker, _ in replica.shards] or [replica.id]
    part, rest = divmod(came, len(takers))
    givers = [replica.source if taker == replica.id else taker for taker in takers]
    return [(giver, part + (index < rest)) for index, giver in enumerate(givers)]


def _add(state: "ClusterState", replica_id: str, total: str, count: int) -> None:
    replica = state.replicas.get(replica_id)
    if replica is not None and state.node.core_version >= TOTALS_SINCE:
        setattr(replica, total, getattr(replica, total) + count)
        state.touch("replica", replica_id)


# Outside forms.


def links_json(state: "ClusterState") -> list[dict[str, Any]]:
    """Between replicas, those in use: KV first, then weights, each by source and target."""
    using: dict[tuple[str, str, str], list[Flow]] = {}
    for flow in open_flows(state):
        using.setdefault((flow.carries, flow.source, flow.target), []).append(flow)
    return [
        {
            "source": source,
            "target": target,
            "carries": carries,
            "leases": [flow.lease for flow in flows if flow.lease],
            "bytes_moved": sum(flow.moved for flow in flows),
            "bytes_total": sum(flow.total for flow in flows),
            "over": [way.link for way in ways(state, source, target)],
        }
        for (carries, source, target), flows in sorted(using.items())
    ]


def topology_json(state: "ClusterState") -> list[dict[str, Any]]:
    """Nodes that are described, and the flows on their links now."""
    now = traffic(state)
    return [
        {
            "node": node.node,
            "links": [{"name": name} | _on_link(now, f"{node.node}/{name}") for name in node.links],
            "rate_bytes_s": node.rate,
            "leaf": node.leaf,
            "domain": node.domain or node.node,
            "domain_rate_bytes_s": node.domain_rate,
        }
        for _, node in sorted(state.topology.items())
    ]


def _on_link(now: Counter[tuple[Way, str]], link: str) -> dict[str, dict[str, int]]:
    return {
        direction: {carries: now[Way(link, direction), carries] for carries in KINDS}
        for direction in ("out", "in")
    }


def moving(flows: Iterable[Flow]) -> Counter[tuple[str, str]]:
    """How many of each kind each replica takes in and gives: by (replica, such as kv_in)."""
    found: Counter[tuple[str, str]] = Counter()
    for flow in flows:
        found[flow.source, f"{flow.carries}_out"] += 1
        found[flow.target, f"{flow.carries}_in"] += 1
    return found


def flow_json(replica: Replica, now: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """Of one replica, by kind and direction: bytes until now, and transfers under way."""
    return {
        name: {"bytes": getattr(replica, name), "open": now[replica.id, name]}
        for name in ("kv_in", "kv_out", "weights_in", "weights_out")
    }
