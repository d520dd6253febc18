"""Which replicas can give their weights to others, and to whom."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from blitzd.control import multicast, shards
from blitzd.control.chunks import chunk_of
from blitzd.control.multicast import Chain
from blitzd.control.topology import Topology, topology_of
from blitzd.control.turn import Turn
from blitzd.fsm import ClusterState, Replica, ReplicaState
from blitzd.fsm.flow import link_of, links_of, traffic
from blitzd.fsm.table import WITHOUT_WEIGHTS

S = ReplicaState
KV_LEAVES = frozenset(
    {S.PREFILL, S.OLD_PREFILL, S.REFACTORY_PREFILL, S.MUTATING_TO_DECODE, S.SHUTTING_PREFILL}
)
"""Whose egress is for KV: weights and KV never share the direction of a link."""
HOLDS = frozenset(S) - WITHOUT_WEIGHTS - {S.NEW_PREFILL}
"""Who has weights, or is getting them. A NewPrefill serves meanwhile: its links are spoken for."""
PEERS = 8
"""That a load may turn to, nearest first."""

Upstream = tuple[tuple[str, int], ...]
"""(replica, epoch), nearest first."""


class Given(NamedTuple):
    """Where a load's weights come from."""

    peers: Upstream = ()
    """None: from the node's own file."""
    shards: Upstream = ()
    """Who of its domain brings which shard; none: the load is not sharded."""
    chunk: int = 0
    """Bytes of a message over the network; 0: as many as the transport takes."""


def chains(
    turn: Turn, groups: Iterable[tuple[Sequence[Replica], Sequence[Replica]]]
) -> dict[str, Given]:
    """Of each target that a chain reaches, in the order in which the bytes pass them. A group is
    (those that give, their targets), and no chain leads from one into another."""
    groups = [(sources, targets) for sources, targets in groups if sources and targets]
    if not groups:
        return {}
    # Once for all: there may be a group for each of a thousand nodes.
    members = [replica for group in groups for side in group for replica in side]
    topology, busy = topology_of(turn.state, members), busy_links(turn)
    found: dict[str, Given] = {}
    for sources, targets in groups:
        links = {topology.devices[r.id].link for side in (sources, targets) for r in side}
        planned = multicast.plan(
            topology,
            [r.id for r in sources],
            [r.id for r in targets],
            busy_links=links & busy,
        )
        for chain in planned:
            found |= _upstreams(turn.state, topology, chain)
    return found


def _upstreams(state: ClusterState, topology: Topology, chain: Chain) -> dict[str, Given]:
    found: dict[str, Given] = {}
    upstream = from_source(state.replicas[chain.source])
    chunk = _chunk(state, topology, chain, 1)
    for target_id in chain.targets:
        found[target_id] = Given(upstream, (), chunk)
        upstream = (_named(state, target_id), *upstream[: PEERS - 1])
    return found


def sharded(turn: Turn, sources: Sequence[Replica], targets: Sequence[Replica]) -> dict[str, Given]:
    """Of each target that shards reach. Its peers are those of its own shard's chain, nearest
    first: each of them has all of the weights, or will."""
    if not sources or not targets:
        return {}
    busy_in = {way.link for way, _ in traffic(turn.state) if way.direction == "in"}
    found: dict[str, Given] = {}
    topology = topology_of(turn.state, (*sources, *targets))
    for one in shards.plan(
        topology,
        [r.id for r in sources],
        [r.id for r in targets],
        busy_out=busy_links(turn),
        busy_in=busy_in,
    ):
        chunk = min(_chunk(turn.state, topology, c, len(one.chains)) for c in one.chains)
        for upstreams, beside in _places(turn.state, one):
            takers = tuple(_named(turn.state, taker) for taker in upstreams)
            for taker, upstream in upstreams.items():
                found[taker] = Given(upstream[:PEERS], takers, chunk)
            for target in beside:
                found[target] = Given(takers[:PEERS], takers, chunk)
    return found


def _chunk(state: ClusterState, topology: Topology, chain: Chain, parts: int) -> int:
    """For so many parts of the weights, where links are described."""
    source = state.replicas[chain.source]
    if not state.topology or not source.bytes_total:
        return 0
    return chunk_of(topology, chain, source.bytes_total // parts, len(source.peers))


def _places(
    state: ClusterState, one: shards.Sharded
) -> Iterator[tuple[dict[str, Upstream], tuple[str, ...]]]:
    """Of each domain, in the order in which the bytes pass them: the upstream of each taker,
    by shard, and those that take none."""
    upstreams = [from_source(state.replicas[chain.source]) for chain in one.chains]
    for place, beside in enumerate(one.beside):
        takers = [chain.targets[place] for chain in one.chains]
        yield dict(zip(takers, upstreams, strict=True)), beside
        upstreams = [
            (_named(state, taker), *upstream)
            for taker, upstream in zip(takers, upstreams, strict=True)
        ]


def _named(state: ClusterState, replica_id: str) -> tuple[str, int]:
    return replica_id, state.replicas[replica_id].epoch


def from_source(source: Replica) -> Upstream:
    """It, then its own sources while it loads itself."""
    return ((source.id, source.epoch), *source.peers)[:PEERS]


def givers(turn: Turn, targets: Sequence[Replica]) -> list[Replica]:
    """Those that have the weights, or are getting them, and give them to nobody yet; by id.
    None when nobody wants them."""
    if not targets:
        return []
    feeding, wanted = turn.state.feeding(), {r.id for r in targets}
    return [
        replica
        for replica in turn.state.in_states(*HOLDS)
        if replica.id not in feeding
        and not (replica.peers and _leans_on(turn.state, replica, wanted))
    ]


def with_free_egress(turn: Turn, givers: Sequence[Replica]) -> list[Replica]:
    """Without those whose egress is spoken for, as the policy sees it: for KV, or by KV that
    leaves it now, as that of a decode which shuts does."""
    if turn.policy.ladder_prefills_give:
        return list(givers)
    leases = turn.state.leases.values()
    leaving = {source for lease in leases for source in (lease.source, lease.rest)}
    return [r for r in givers if not (r.state in KV_LEAVES or r.id in leaving)]


def busy_links(turn: Turn) -> set[str]:
    """Described links whose egress carries something, or is for KV: those that several replicas
    share, and where one of them could get in the way of another."""
    state = turn.state
    if not state.topology:
        return set()
    found = {way.link for way, _ in traffic(state) if way.direction == "out"}
    if not turn.policy.ladder_prefills_give:
        found.update(links_of(state, state.in_states(*KV_LEAVES, S.NEW_PREFILL)))
    return found


def one_a_link(turn: Turn, givers: Sequence[Replica]) -> list[Replica]:
    """Those that may all give over the network at a time."""
    state, busy = turn.state, busy_links(turn)
    if not state.topology:
        return list(givers)
    found = []
    for replica in givers:
        link = link_of(state, replica)
        if link not in busy:
            busy.add(link)
            found.append(replica)
    return found


def _leans_on(state: ClusterState, replica: Replica, targets: set[str]) -> bool:
    """Whether it may turn to one of them, now or later, for what it does not have yet: each
    would wait for the other."""
    open_, seen = [replica], {replica.id}
    while open_:
        for peer_id, epoch in open_.pop().peers:
            peer = state.replicas.get(peer_id)
            if peer is None or peer.epoch != epoch or peer_id in seen:
                continue
            if peer_id in targets:
                return True
            seen.add(peer_id)
            open_.append(peer)
    return False
