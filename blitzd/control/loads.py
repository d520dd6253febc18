"""Where a replica that is to load gets its weights from."""

from collections.abc import Iterable, Sequence

from blitzd.control import multicast
from blitzd.control.commands import LoadModel
from blitzd.control.topology import topology_of
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.fsm import ClusterState, Replica, ReplicaState
from blitzd.fsm.table import LOADING, WITHOUT_WEIGHTS

S = ReplicaState
KV_LEAVES = frozenset(
    {S.PREFILL, S.OLD_PREFILL, S.REFACTORY_PREFILL, S.MUTATING_TO_DECODE, S.SHUTTING_PREFILL}
)
"""Whose egress is for KV: weights and KV never share the direction of a link."""
PEERS = 8
"""That a load may turn to, nearest first."""
TRIES = 2
"""From peers, in a row, before the node's own file is taken."""

Upstream = tuple[tuple[str, int], ...]
"""(replica, epoch), nearest first."""


def start(turn: Turn, replicas: Sequence[Replica]) -> None:
    """Starts the loads of these replicas, which are Inactive and have a worker.

    From replicas that have the weights, in chains, if the policy says so and one has a free
    egress; else from the file that the node maps.
    """
    from_peers: dict[str, Upstream] = {}
    if turn.policy.weights_from_peers:
        from_peers = _upstreams(turn, [r for r in replicas if r.peer_failures < TRIES])
    # In the order of the chains: no state shows a load from one that does not load yet.
    for replica_id in [*from_peers, *(r.id for r in replicas if r.id not in from_peers)]:
        replica = turn.state.replicas[replica_id]
        upstream = from_peers.get(replica_id, ())
        source = upstream[0][0] if upstream else "map"
        turn.emit(ev.LoadStarted(replica.id, replica.epoch, replica.role, source, upstream))
        turn.command(LoadModel(replica.id, replica.epoch, upstream))


def _upstreams(turn: Turn, targets: Sequence[Replica]) -> dict[str, Upstream]:
    if not targets:
        return {}
    replicas, sources = turn.state.replicas, _sources(turn, {r.id for r in targets})
    busy = {replica.id for replica in sources if replica.state in KV_LEAVES}
    chains = multicast.plan(
        topology_of(turn.state), [r.id for r in sources], [r.id for r in targets], busy
    )
    found: dict[str, Upstream] = {}
    for chain in chains:
        source = replicas[chain.source]
        upstream: Upstream = ((source.id, source.epoch), *source.peers)
        for target_id in chain.targets:
            found[target_id] = upstream[:PEERS]
            upstream = ((target_id, replicas[target_id].epoch), *upstream)
    return found


def _sources(turn: Turn, targets: set[str]) -> list[Replica]:
    """Those that have the weights, or are getting them, and give them to nobody yet."""
    feeding = turn.state.feeding()
    return [
        replica
        for replica in _holders(turn.state.replicas.values())
        if replica.id not in feeding and not _leans_on(turn.state, replica, targets)
    ]


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


def _holders(replicas: Iterable[Replica]) -> list[Replica]:
    return [
        replica
        for replica in replicas
        if replica.worker == "attached"
        and (replica.state in LOADING or replica.state not in WITHOUT_WEIGHTS)
        # It serves while it loads: its links are spoken for.
        and replica.state is not S.NEW_PREFILL
    ]
