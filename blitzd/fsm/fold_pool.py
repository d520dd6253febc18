"""Folders of the pool's copy."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.entities import Replica
from blitzd.fsm.folding import IllegalEvent, folds, replica_of
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import ReplicaState


@folds(ev.PoolCopyAssigned)
def _(state: ClusterState, event: ev.PoolCopyAssigned, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if replica.state is not ReplicaState.INACTIVE or replica.worker != "attached":
        raise IllegalEvent(
            f"replica {replica.id} is {replica.state} with worker {replica.worker}: it keeps no"
            " copy for others"
        )
    if state.index.pooled:
        raise IllegalEvent(f"{', '.join(sorted(state.index.pooled))} keeps the copy")
    replica.pooled = "filling"
    state.touch("replica", replica.id)


def _pooled(state: ClusterState, event: ev.PoolCopyHeld | ev.PoolCopyFailed) -> Replica:
    replica = replica_of(state, event.replica, event.epoch)
    if replica.pooled != "filling":
        raise IllegalEvent(f"replica {replica.id} is not filling a copy")
    return replica


@folds(ev.PoolCopyHeld)
def _(state: ClusterState, event: ev.PoolCopyHeld, record: Record) -> None:
    replica = _pooled(state, event)
    replica.pooled = "held"
    state.touch("replica", replica.id)


@folds(ev.PoolCopyFailed)
def _(state: ClusterState, event: ev.PoolCopyFailed, record: Record) -> None:
    replica = _pooled(state, event)
    replica.pooled, replica.trouble = "", event.reason
    replica.failures += 1
    replica.retry_ns = event.retry_ns
    state.touch("replica", replica.id)


@folds(ev.PoolCopyReleased)
def _(state: ClusterState, event: ev.PoolCopyReleased, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if not replica.pooled:
        raise IllegalEvent(f"replica {replica.id} keeps no copy")
    replica.pooled = ""
    state.touch("replica", replica.id)
