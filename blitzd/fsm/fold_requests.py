"""Folders of requests and their KV leases."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm import flow, fold_plan
from blitzd.fsm.entities import Loss, Replica, Request
from blitzd.fsm.folding import IllegalEvent, count, folds, lease_of, replica_of, request_of
from blitzd.fsm.link import Lease
from blitzd.fsm.request import RequestState, next_request_state
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import ACCEPTS_KV, ACCEPTS_PROMPTS, ReplicaState


@folds(ev.RequestAccepted)
def _(state: ClusterState, event: ev.RequestAccepted, record: Record) -> None:
    if event.request_id in state.requests:
        raise IllegalEvent(f"request {event.request_id} was accepted before")
    state.requests[event.request_id] = Request(
        event.request_id,
        RequestState.QUEUED,
        event.prompt_tokens,
        event.max_tokens,
        event.seed,
        event.deadline_ns,
        arrived_ns=record.mono_ns,
        resumable=event.resumable,
    )
    state.touch("request", event.request_id)
    fold_plan.arrived(state, event.prompt_tokens, record.mono_ns)


@folds(ev.RequestRejected)
def _(state: ClusterState, event: ev.RequestRejected, record: Record) -> None:
    count(state, RequestState.REJECTED.value)


@folds(ev.PrefillStarted)
def _(state: ClusterState, event: ev.PrefillStarted, record: Record) -> None:
    request = request_of(state, event.request_id)
    replica = _accepting(state, event.replica, event.epoch, ACCEPTS_PROMPTS, "prompts")
    if event.rest:
        rest = replica_of(state, event.rest, event.rest_epoch)
        if not replica.pair_id or rest.pair_id != replica.pair_id:
            raise IllegalEvent(f"{rest.id} and {replica.id} are not of one pair")
    moved_to = next_request_state(request.id, request.state, "prefill")
    fold_plan.granted(state, replica, record.mono_ns)
    request.state = moved_to
    request.source, request.source_epoch = event.replica, event.epoch
    request.source_blocks = event.blocks
    request.rest, request.rest_epoch = event.rest, event.rest_epoch
    request.rest_blocks = event.rest_blocks
    state.touch("request", request.id)


def _accepting(
    state: ClusterState, replica_id: str, epoch: int, states: frozenset[ReplicaState], what: str
) -> Replica:
    """The guard: raises IllegalEvent when `what` may not enter the replica now."""
    replica = replica_of(state, replica_id, epoch)
    if replica.state not in states:
        raise IllegalEvent(f"replica {replica.id} is {replica.state}: it accepts no {what}")
    return replica


@folds(ev.PrefillFinished)
def _(state: ClusterState, event: ev.PrefillFinished, record: Record) -> None:
    request = request_of(state, event.request_id)
    next_request_state(request.id, request.state, "stay" if event.stays else "first_token")
    fold_plan.prefilled(state, request, record.mono_ns)
    if event.stays:
        request.state = next_request_state(request.id, request.state, "stay")
        settle_down(request)
    else:
        if request.state is RequestState.PREFILLING:  # all of it there
            forget_rest(request)
        request.state = next_request_state(request.id, request.state, "first_token")
    state.touch("request", request.id)


def forget_rest(request: Request) -> None:
    request.rest, request.rest_epoch, request.rest_blocks = "", 0, 0
    request.split_layer = 0


@folds(ev.RequestRelayed)
def _(state: ClusterState, event: ev.RequestRelayed, record: Record) -> None:
    request = request_of(state, event.request_id)
    relayed = next_request_state(request.id, request.state, "relay")
    if not request.rest:
        raise IllegalEvent(f"request {request.id} has nobody to go on with it")
    rest = replica_of(state, request.rest, request.rest_epoch)
    fold_plan.granted(state, rest, record.mono_ns)
    request.state, request.relayed_ns = relayed, record.mono_ns
    request.split_layer = event.layers
    count(state, "relays")
    count(state, "relayed_layers_new", event.layers)
    count(state, "relayed_layers_old", rest.layers_total - event.layers)
    if not event.layers:
        request.source, request.source_epoch = request.rest, request.rest_epoch
        request.source_blocks = request.rest_blocks
        forget_rest(request)
    state.touch("request", request.id)


@folds(ev.RequestReturned)
def _(state: ClusterState, event: ev.RequestReturned, record: Record) -> None:
    request = request_of(state, event.request_id)
    replica_of(state, event.replica, event.epoch)
    request.state = next_request_state(request.id, request.state, "return")
    request.source, request.source_epoch, request.source_blocks = "", 0, 0
    forget_rest(request)
    request.whole = 1
    state.touch("request", request.id)


def settle_down(request: Request) -> None:
    """What was its source is its target from here on."""
    request.target, request.target_epoch = request.source, request.source_epoch
    request.target_blocks = request.source_blocks
    request.source, request.source_epoch, request.source_blocks = "", 0, 0


@folds(ev.MigrationStarted)
def _(state: ClusterState, event: ev.MigrationStarted, record: Record) -> None:
    request = request_of(state, event.request_id)
    if request.state is not RequestState.MIGRATING or request.lease_id:
        raise IllegalEvent(
            f"request {request.id} is {request.state} with lease {request.lease_id}:"
            " it takes no KV lease"
        )
    if event.lease_id != state.node.next_lease:
        raise IllegalEvent(f"lease {event.lease_id} is out of order ({state.node.next_lease})")
    if event.target in (event.source, event.rest):
        raise IllegalEvent(f"lease {event.lease_id} leads from {event.target} to itself")
    rest = (request.rest, request.rest_epoch, request.split_layer)
    if (event.rest, event.rest_epoch, event.split_layer) != rest:
        raise IllegalEvent(f"request {request.id} has its KV on {request.source} and {rest}")
    _accepting(state, event.target, event.target_epoch, ACCEPTS_KV, "KV")
    request.target, request.target_epoch = event.target, event.target_epoch
    request.target_blocks, request.lease_id = event.blocks, event.lease_id
    state.leases[event.lease_id] = Lease(
        event.lease_id,
        event.request_id,
        event.source,
        event.source_epoch,
        event.target,
        event.target_epoch,
        record.mono_ns,
        event.expires_ns,
        event.cap_ns,
        rest=event.rest,
        rest_epoch=event.rest_epoch,
        split_layer=event.split_layer,
    )
    state.node.next_lease += 1
    state.touch("node", 0)
    state.touch("request", request.id)
    state.touch("lease", event.lease_id)


@folds(ev.MigrationFinished)
def _(state: ClusterState, event: ev.MigrationFinished, record: Record) -> None:
    lease = lease_of(state, event.lease_id)
    request = request_of(state, lease.request_id)
    request.state = next_request_state(request.id, request.state, "arrived")
    fold_plan.moved(state, request, lease, record.mono_ns)
    flow.kv_moved(state, lease, event.bytes_moved)
    request.source, request.source_epoch, request.source_blocks = "", 0, 0
    forget_rest(request)
    request.relayed_ns = 0
    request.moving = ""
    _close(state, lease, request)


@folds(ev.MigrationFailed)
def _(state: ClusterState, event: ev.MigrationFailed, record: Record) -> None:
    lease = lease_of(state, event.lease_id)
    request = request_of(state, lease.request_id)
    if event.fault != "no_room":
        request.tried += (f"{request.target}/{request.target_epoch}",)
    request.target, request.target_epoch, request.target_blocks = "", 0, 0
    request.retry_ns = event.retry_ns
    _close(state, lease, request)


def _close(state: ClusterState, lease: Lease, request: Request) -> None:
    del state.leases[lease.id]
    request.lease_id = 0
    state.touch("lease", lease.id)
    state.touch("request", request.id)


@folds(ev.RequestResumed)
def _(state: ClusterState, event: ev.RequestResumed, record: Record) -> None:
    request = request_of(state, event.request_id)
    queued = next_request_state(request.id, request.state, "resume")
    if not request.output_tokens <= event.output_tokens < request.max_tokens:
        raise IllegalEvent(
            f"request {request.id} had {request.output_tokens} of {request.max_tokens} tokens:"
            f" it cannot go on after {event.output_tokens}"
        )
    if request.lease_id:
        _close(state, lease_of(state, request.lease_id), request)
    request.state = queued
    request.source, request.source_epoch, request.source_blocks = "", 0, 0
    request.target, request.target_epoch, request.target_blocks = "", 0, 0
    forget_rest(request)
    request.relayed_ns = 0
    moved_on = event.output_tokens > request.output_tokens
    lost = Loss(event.replica, event.epoch, event.reason)
    request.losses = (lost,) if moved_on else (*request.losses, lost)
    request.output_tokens, request.retry_ns = event.output_tokens, event.retry_ns
    request.resumes += 1
    request.tried, request.moving = (), ""
    count(state, f"resumed_{event.cause}")
    state.touch("request", request.id)


@folds(ev.RequestFinished)
def _(state: ClusterState, event: ev.RequestFinished, record: Record) -> None:
    request = request_of(state, event.request_id)
    if request.state in (RequestState.PREFILLING, RequestState.RELAYED):  # with its only token
        fold_plan.prefilled(state, request, record.mono_ns)
    _end(state, event.request_id, "finish")


@folds(ev.RequestFailed)
def _(state: ClusterState, event: ev.RequestFailed, record: Record) -> None:
    _end(state, event.request_id, "fail")


@folds(ev.RequestCancelled)
def _(state: ClusterState, event: ev.RequestCancelled, record: Record) -> None:
    _end(state, event.request_id, "cancel")


def _end(state: ClusterState, request_id: int, trigger: str) -> None:
    request = request_of(state, request_id)
    end = next_request_state(request.id, request.state, trigger)
    if request.lease_id:
        state.touch("lease", request.lease_id)
        del state.leases[request.lease_id]
    del state.requests[request.id]
    state.touch("request", request.id)
    count(state, end.value)
