"""Folders of planned restarts, and of the policy that an operator changes."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.folding import IllegalEvent, folds, replica_of
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import ReplicaState


@folds(ev.RestartStarted)
def _(state: ClusterState, event: ev.RestartStarted, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if replica.restart_epoch:
        raise IllegalEvent(f"replica {replica.id} restarts already")
    replica.restart_epoch, replica.restart_ns = event.epoch, record.mono_ns
    replica.restart_drain_ms = event.drain_ms
    # Told to start again, it does not wait for what went wrong before.
    replica.retry_ns = replica.failures = 0
    if replica.state in _FINISHES_FIRST:
        deadline_ns = record.mono_ns + event.drain_ms * 1_000_000
        replica.drain_deadline_ns = min(replica.drain_deadline_ns or deadline_ns, deadline_ns)
    state.touch("replica", replica.id)


_FINISHES_FIRST = (
    ReplicaState.AUS_PREFILL,
    ReplicaState.MUTATING_TO_DECODE,
    ReplicaState.SHUTTING_PREFILL,
    ReplicaState.SHUTTING_DECODE,
)


@folds(ev.RestartEnded)
def _(state: ClusterState, event: ev.RestartEnded, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if not replica.restart_epoch:
        raise IllegalEvent(f"replica {replica.id} does not restart")
    replica.restart_epoch = replica.restart_ns = replica.restart_drain_ms = 0
    if replica.state not in _FINISHES_FIRST:
        replica.drain_deadline_ns = 0
    state.touch("replica", replica.id)
    if event.reason and event.replica in state.node.rolling:
        state.node.rolling = {r: e for r, e in state.node.rolling.items() if r != event.replica}
        state.touch("node", 0)


@folds(ev.RollingRestartStarted)
def _(state: ClusterState, event: ev.RollingRestartStarted, record: Record) -> None:
    if state.node.rolling:
        raise IllegalEvent("a rolling restart is under way")
    for replica_id, epoch in event.replicas:
        replica_of(state, replica_id, epoch)
    state.node.rolling = dict(event.replicas)
    state.node.rolling_drain_ms = event.drain_ms
    state.touch("node", 0)


@folds(ev.RollingRestartEnded)
def _(state: ClusterState, event: ev.RollingRestartEnded, record: Record) -> None:
    state.node.rolling, state.node.rolling_drain_ms = {}, 0
    state.touch("node", 0)


@folds(ev.StandInCalled)
def _(state: ClusterState, event: ev.StandInCalled, record: Record) -> None:
    replica = replica_of(state, event.replica)
    absent = replica_of(state, event.stands_in_for)
    if replica is absent or replica.role != absent.role or not absent.restart_epoch:
        raise IllegalEvent(f"replica {replica.id} cannot stand in for {absent.id}")
    replica.stands_in = absent.id
    state.touch("replica", replica.id)


@folds(ev.StandInReleased)
def _(state: ClusterState, event: ev.StandInReleased, record: Record) -> None:
    replica = replica_of(state, event.replica)
    replica.stands_in = ""
    state.touch("replica", replica.id)


@folds(ev.PolicyChanged)
def _(state: ClusterState, event: ev.PolicyChanged, record: Record) -> None:
    state.node.policy = state.node.policy | {name: new for name, _, new in event.changes}
    state.touch("node", 0)
