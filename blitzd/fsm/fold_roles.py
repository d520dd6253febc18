"""Folders of role changes, shutdowns and warm spares."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.fold_requests import settle_down
from blitzd.fsm.folding import (
    IllegalEvent,
    folds,
    forget_weights,
    move,
    replica_of,
    request_of,
    require_idle,
)
from blitzd.fsm.request import RequestState, next_request_state
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import ReplicaState


@folds(ev.ShutdownStarted)
def _(state: ClusterState, event: ev.ShutdownStarted, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    was = replica.state
    move(replica, "shut", record)
    replica.null_role = _ROLE_OF[was]
    # One that restarts keeps its role, and nobody needs to take its place.
    replica.role = replica.role if event.reason == "restart" else "spare"
    replica.drain_deadline_ns = event.deadline_ns
    replica.cordoned = int(event.reason == "drain")
    replica.stands_in = ""
    state.touch("replica", replica.id)


_ROLE_OF = {
    ReplicaState.PREFILL: "prefill",
    ReplicaState.DECODE: "decode",
    ReplicaState.COLOCATED: "colocated",
}


@folds(ev.ReplicaRevived)
def _(state: ClusterState, event: ev.ReplicaRevived, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, event.trigger, record)
    replica.role, replica.drain_deadline_ns, replica.cordoned = event.role, 0, 0
    state.touch("replica", replica.id)


@folds(ev.ReplicaEmptied)
def _(state: ClusterState, event: ev.ReplicaEmptied, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    require_idle(state, replica)
    move(replica, "empty", record)
    replica.null_ns, replica.drain_deadline_ns = record.mono_ns, 0
    state.touch("replica", replica.id)


@folds(ev.ReplicaExpired)
def _(state: ClusterState, event: ev.ReplicaExpired, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    require_idle(state, replica)
    move(replica, "expire", record)
    replica.role, replica.null_role = "spare", "decode"
    replica.null_ns = record.mono_ns
    state.touch("replica", replica.id)


@folds(ev.NullReused)
def _(state: ClusterState, event: ev.NullReused, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    trigger = f"reuse_{event.role}"
    if event.role == "decode" and replica.null_role != "decode":
        trigger = "reuse_as_decode"
    move(replica, trigger, record)
    replica.role, replica.null_role, replica.null_ns = event.role, "", 0
    replica.cordoned = 0
    state.touch("replica", replica.id)


@folds(ev.ReplicaDeactivated)
def _(state: ClusterState, event: ev.ReplicaDeactivated, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, "deactivate", record)
    replica.null_role, replica.null_ns = "", 0
    forget_weights(replica)
    state.touch("replica", replica.id)


@folds(ev.RoleAssigned)
def _(state: ClusterState, event: ev.RoleAssigned, record: Record) -> None:
    replica = replica_of(state, event.replica)
    if replica.state not in (ReplicaState.INACTIVE, ReplicaState.FAILED):
        raise IllegalEvent(f"replica {replica.id} is {replica.state}: its role is its state's")
    replica.role, replica.cordoned, replica.stands_in = event.role, 0, ""
    state.touch("replica", replica.id)


@folds(ev.ReplicaCordoned)
def _(state: ClusterState, event: ev.ReplicaCordoned, record: Record) -> None:
    replica = replica_of(state, event.replica)
    if replica.state not in _SERVES_NOTHING_NEW:
        raise IllegalEvent(f"replica {replica.id} is {replica.state}: it has to be shut first")
    if not replica.null_role:
        replica.null_role = replica.role
    replica.role, replica.cordoned, replica.stands_in = "spare", 1, ""
    replica.drain_deadline_ns = event.deadline_ns
    state.touch("replica", replica.id)


_SERVES_NOTHING_NEW = (
    ReplicaState.INACTIVE,
    ReplicaState.FAILED,
    ReplicaState.SHUTTING_PREFILL,
    ReplicaState.SHUTTING_DECODE,
    ReplicaState.SHUTTING_NULL,
)


@folds(ev.MutationStarted)
def _(state: ClusterState, event: ev.MutationStarted, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, "mutate", record)
    replica.role, replica.stands_in, replica.drain_deadline_ns = event.role, "", 0
    state.touch("replica", replica.id)


@folds(ev.MutationFinished)
def _(state: ClusterState, event: ev.MutationFinished, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    flushed = [request_of(state, request_id) for request_id in event.request_ids]
    moves = [(r, next_request_state(r.id, r.state, "stay")) for r in flushed]
    for request in flushed:
        if request.state is not RequestState.MIGRATING:
            raise IllegalEvent(f"request {request.id} is {request.state}: its KV is not whole")
        if request.source != replica.id or request.lease_id:
            raise IllegalEvent(f"request {request.id} is not only on {replica.id}")
    if len(flushed) != len(state.requests_on(replica.id)):
        raise IllegalEvent(f"replica {replica.id} has requests that are not flushed")
    move(replica, "open", record)
    for request, settled in moves:
        request.state = settled
        settle_down(request)
        state.touch("request", request.id)
    state.touch("replica", replica.id)


@folds(ev.PrefillOpened)
def _(state: ClusterState, event: ev.PrefillOpened, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if replica.state is ReplicaState.REFACTORY_PREFILL:
        move(replica, "settle", record)
    else:
        require_idle(state, replica)
        move(replica, "open", record)
    state.touch("replica", replica.id)


@folds(ev.ScaleSet)
def _(state: ClusterState, event: ev.ScaleSet, record: Record) -> None:
    state.node.wanted_prefill, state.node.wanted_decode = event.prefill, event.decode
    state.touch("node", 0)
