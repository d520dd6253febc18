"""The lower rungs of the ladder: where a replica that is to load gets its weights from.

Every load is decided here, also those of a boot and of a restart. The rungs are asked in
order, each for all that are still without a source.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from blitzd.control import host_cache, host_pool, pairs
from blitzd.control.commands import LoadModel
from blitzd.control.holders import (
    Given,
    Upstream,
    chains,
    from_source,
    givers,
    one_a_link,
    sharded,
    with_free_egress,
)
from blitzd.control.ladder import is_off
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica
from blitzd.fsm.table import LOADING

TRIES = 2
"""From peers, in a row, before the node's own file is taken."""

Sources = dict[str, Given]
"""By replica."""


class LoadRung(NamedTuple):
    name: str
    find: Callable[[Turn, Sequence[Replica], Sequence[Replica]], Sources]
    """Of these that are to load, from those that could give."""
    none: str
    """Said to those it has no source for."""
    from_peers: bool = False


def start(turn: Turn, replicas: Sequence[Replica]) -> None:
    """Starts the loads of these replicas, which are Inactive and have a worker."""
    left = {replica.id: replica for replica in replicas}
    tired = {replica.id for replica in replicas if replica.peer_failures >= TRIES}
    # Of those that go on asking peers, and of those that do not any more.
    skipped: dict[bool, tuple[tuple[str, str], ...]] = {False: (), True: ()}
    giving, at = list[Replica](), 0
    olds = pairs.Olds(turn)
    for rung in RUNGS:
        if not left:
            return
        off = is_off(turn.policy, rung.name)
        asking = list(left.values())
        if rung.from_peers and tired:
            asking = [replica for replica in asking if replica.id not in tired]
        if rung.from_peers and not off and turn.state.seq != at:
            # Thousands: only anew when a load has begun since.
            giving, at = givers(turn, asking), turn.state.seq
        found = {} if off else rung.find(turn, asking, giving)
        tails = found.keys() - {source.peers[0][0] for source in found.values() if source.peers}
        # In the order of the chains: no state shows a load from one that does not load yet.
        for replica_id, source in found.items():
            replica, before = left.pop(replica_id), skipped[replica_id in tired]
            live = replica_id in tails and _may_go_live(turn, replica, source)
            old = olds.take() if live else None
            if source.peers:
                olds.feeds(source.peers[0][0])
            if old is not None:
                pairs.open_pair(turn, replica, old, source.peers, rung.name, before)
            else:
                _begin(turn, replica, rung.name, source, before)
        why = f"peers failed it {TRIES} times in a row" if rung.from_peers else rung.none
        skipped[False] += ((rung.name, off or rung.none),)
        skipped[True] += ((rung.name, off or why),)


def from_peers(turn: Turn, replica: Replica) -> tuple[str, Upstream] | None:
    """(rung, whom) it can get weights from over one link; None: nobody."""
    giving = givers(turn, [replica])
    for rung in RUNGS:
        if rung.from_peers and not is_off(turn.policy, rung.name):
            found = rung.find(turn, [replica], giving).get(replica.id, Given())
            if found.peers and not found.shards:
                return rung.name, found.peers
    return None


def _may_go_live(turn: Turn, replica: Replica, source: Given) -> bool:
    """Whether it serves before its last layer is there, if somebody finishes for it. Only the end
    of a chain goes live: its egress is free for what it hands over, and it has its last layer
    last. Of a sharded load all layers come at about the same time. One that failed tries the
    plain way."""
    live = turn.policy.ladder_live and replica.role == "prefill" and not replica.peer_failures
    return bool(live and source.peers and not source.shards)


def _begin(
    turn: Turn,
    replica: Replica,
    rung: str,
    given: Given,
    skipped: tuple[tuple[str, str], ...],
) -> None:
    peers, shards, chunk = given
    source = peers[0][0] if peers else rung
    who = (replica.id, replica.epoch)
    turn.emit(ev.LoadStarted(*who, replica.role, source, peers, rung, skipped, shards))
    policy = turn.policy
    floor_ms = policy.mock_transfer_ms if peers else policy.mock_load_ms
    turn.command(LoadModel(*who, peers, rung, floor_ms, shards=shards, chunk_bytes=chunk))


def _own_file(_: Turn, targets: Sequence[Replica], giving: Sequence[Replica]) -> Sources:
    return {replica.id: Given() for replica in targets}


def _neighbours(turn: Turn, targets: Sequence[Replica], giving: Sequence[Replica]) -> Sources:
    """Chains inside a node. A prefill gives too: its KV leaves by the network."""
    wanting = _by_node(targets)
    here = _by_node(replica for replica in giving if replica.node in wanting)
    return chains(turn, [(here[node], group) for node, group in wanting.items() if node in here])


def _by_node(replicas: Iterable[Replica]) -> dict[str, list[Replica]]:
    found: dict[str, list[Replica]] = defaultdict(list)
    for replica in replicas:
        found[replica.node].append(replica)
    return found


def _shards(turn: Turn, targets: Sequence[Replica], giving: Sequence[Replica]) -> Sources:
    # Links that nobody has described may be one.
    free = with_free_egress(turn, giving) if turn.state.topology else []
    return sharded(turn, free, targets)


def _chain(turn: Turn, targets: Sequence[Replica], giving: Sequence[Replica]) -> Sources:
    return chains(turn, [(with_free_egress(turn, giving), targets)])


def _point_to_point(turn: Turn, targets: Sequence[Replica], giving: Sequence[Replica]) -> Sources:
    """Each source gives to one: no more loads at a time than there are sources."""
    holders = [r for r in giving if r.state not in LOADING]
    free = one_a_link(turn, with_free_egress(turn, holders))
    pairs = zip(targets, free, strict=False)
    return {target.id: Given(from_source(source)) for target, source in pairs}


def _host_copy(turn: Turn, targets: Sequence[Replica], giving: Sequence[Replica]) -> Sources:
    hits = {node for node in {r.node for r in targets} if host_cache.has_copy(turn, node)}
    return {replica.id: Given() for replica in targets if replica.node in hits}


def _pool(turn: Turn, targets: Sequence[Replica], giving: Sequence[Replica]) -> Sources:
    """The keeper copies its own, the others hang onto it."""
    keeper = host_pool.keeper_of(turn)
    if keeper is None or not targets or keeper.id in turn.state.feeding():
        return {}
    own = {replica.id: Given() for replica in targets if replica is keeper}
    others = [replica for replica in targets if replica is not keeper]
    return own | chains(turn, [([keeper], others)])


RUNGS: Sequence[LoadRung] = (
    LoadRung("map", _own_file, ""),
    LoadRung("nvlink", _neighbours, "nobody of its node has weights to give", True),
    LoadRung("shard", _shards, "its node has no two free links that as many sources reach", True),
    LoadRung("chain", _chain, "nobody with a free egress has weights to give", True),
    LoadRung("p2p", _point_to_point, "nobody with a free egress has all the weights", True),
    LoadRung("host", _host_copy, "no load left a copy here and no replica has the weights"),
    LoadRung("pool", _pool, "no node keeps a copy that it could give", True),
    LoadRung("disk", _own_file, ""),
)
