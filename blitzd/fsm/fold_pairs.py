"""Folders of live pairs: one event moves both sides, or neither."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm import load_plan
from blitzd.fsm.entities import Pair
from blitzd.fsm.folding import IllegalEvent, folds, forget_weights, move, pair_of, replica_of
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import ReplicaState, next_state


@folds(ev.PairOpened)
def _(state: ClusterState, event: ev.PairOpened, record: Record) -> None:
    new = replica_of(state, event.new, event.new_epoch)
    old = replica_of(state, event.old, event.old_epoch)
    if event.pair_id != state.node.next_pair or new is old:
        raise IllegalEvent(f"pair {event.pair_id} of {new.id} and {old.id} is out of order")
    next_state(f"replica {old.id}", old.state, "pair_old")
    move(new, "pair_new", record)
    move(old, "pair_old", record)
    forget_weights(new)
    new.role, new.source, new.peers = "prefill", event.source, event.peers
    load_plan.begin(state, new, event.rung, event.skipped)
    state.pairs[event.pair_id] = Pair(
        event.pair_id, new.id, new.epoch, old.id, old.epoch, event.cap, record.mono_ns
    )
    new.pair_id = old.pair_id = event.pair_id
    state.node.next_pair += 1
    for replica in (new, old):
        state.touch("replica", replica.id)
    state.touch("pair", event.pair_id)
    state.touch("node", 0)


@folds(ev.PairSettled)
def _(state: ClusterState, event: ev.PairSettled, record: Record) -> None:
    pair = pair_of(state, event.pair_id)
    new = replica_of(state, pair.new, pair.new_epoch)
    old = replica_of(state, pair.old, pair.old_epoch)
    next_state(f"replica {old.id}", old.state, "settle")
    move(new, "settle", record)
    move(old, "settle", record)
    _part(state, pair)


@folds(ev.PairBroken)
def _(state: ClusterState, event: ev.PairBroken, record: Record) -> None:
    """The surviving side, if it is not moved by the event that broke the pair."""
    pair = pair_of(state, event.pair_id)
    for replica_id, epoch in ((pair.new, pair.new_epoch), (pair.old, pair.old_epoch)):
        replica = state.replicas.get(replica_id)
        if replica is not None and replica.epoch == epoch and replica.state in _SETTLES:
            move(replica, "settle", record)
    _part(state, pair)


_SETTLES = (ReplicaState.OLD_PREFILL, ReplicaState.REFACTORY_PREFILL)


@folds(ev.FollowStarted)
def _(state: ClusterState, event: ev.FollowStarted, record: Record) -> None:
    pair = pair_of(state, event.pair_id)
    if pair.following or pair.drained:
        raise IllegalEvent(f"{pair.old} follows {pair.new} already, or is done with it")
    pair.following = 1
    state.touch("pair", pair.id)


@folds(ev.FollowStopped)
def _(state: ClusterState, event: ev.FollowStopped, record: Record) -> None:
    pair = pair_of(state, event.pair_id)
    if not pair.following:
        raise IllegalEvent(f"{pair.old} does not follow {pair.new}")
    pair.following, pair.retry_ns = 0, event.retry_ns
    pair.drained = int(not event.fault)
    pair.follow_faults += int(bool(event.fault))
    state.touch("pair", pair.id)


def _part(state: ClusterState, pair: Pair) -> None:
    del state.pairs[pair.id]
    state.touch("pair", pair.id)
    for replica_id in (pair.new, pair.old):
        replica = state.replicas.get(replica_id)
        if replica is not None and replica.pair_id == pair.id:
            replica.pair_id = 0
            state.touch("replica", replica_id)
