"""The fold: what each event does to the state.

One small function an event type. Each first asks the machines (which may refuse), then
changes entities, so that a refused event changes nothing.
"""

from collections.abc import Callable
from typing import Any

from blitzd.events import types as ev
from blitzd.events.record import Kind, Payload, Record
from blitzd.fsm.request import RequestState, next_request_state
from blitzd.fsm.state import ClusterState, Lease, Replica, Request
from blitzd.fsm.table import ReplicaState, next_state


class IllegalEvent(Exception):
    """The event does not fit the state: it names something unknown, or an old epoch."""


Folder = Callable[[ClusterState, Any, Record], None]
FOLDERS: dict[type[Payload], Folder] = {}


def fold(state: ClusterState, record: Record) -> None:
    """Applies one record. Inputs only move the sequence and the clock.

    Raises IllegalEvent or IllegalTransition, and then the state is as it was.
    """
    if record.payload.kind is Kind.EVENT:
        folder = FOLDERS.get(type(record.payload))
        if folder is not None:
            folder(state, record.payload, record)
    state.seq = record.seq
    state.mono_ns = record.mono_ns


def _folds(event: type[Payload]) -> Callable[[Folder], Folder]:
    def register(folder: Folder) -> Folder:
        FOLDERS[event] = folder
        return folder

    return register


def _replica(state: ClusterState, replica_id: str, epoch: int | None = None) -> Replica:
    replica = state.replicas.get(replica_id)
    if replica is None:
        raise IllegalEvent(f"replica {replica_id!r} is not registered")
    if epoch is not None and epoch != replica.epoch:
        raise IllegalEvent(f"replica {replica_id} is at epoch {replica.epoch}, not {epoch}")
    return replica


def _request(state: ClusterState, request_id: int) -> Request:
    request = state.requests.get(request_id)
    if request is None:
        raise IllegalEvent(f"request {request_id} is not under way")
    return request


def _lease(state: ClusterState, lease_id: int) -> Lease:
    lease = state.leases.get(lease_id)
    if lease is None:
        raise IllegalEvent(f"lease {lease_id} is not open")
    return lease


def _move(replica: Replica, trigger: str, record: Record) -> None:
    new = next_state(f"replica {replica.id}", replica.state, trigger)
    if new is not replica.state:
        replica.state = new
        replica.since_seq = record.seq
        replica.cause_seq = record.cause


def _count(state: ClusterState, what: str) -> None:
    state.node.tallies[what] = state.node.tallies.get(what, 0) + 1
    state.touch("node", 0)


# The node.


@_folds(ev.NodeStarted)
def _(state: ClusterState, event: ev.NodeStarted, record: Record) -> None:
    node = state.node
    node.name, node.version, node.boot_epoch = event.node, event.version, event.boot_epoch
    node.phase, node.drain_deadline_ns = "running", 0
    node.policy = dict(event.policy)
    # The core's clock starts again with each boot, so times of the last one mean nothing.
    for replica in state.replicas.values():
        replica.retry_ns = replica.failures = 0
        state.touch("replica", replica.id)
    state.touch("node", 0)


@_folds(ev.NodeDraining)
def _(state: ClusterState, event: ev.NodeDraining, record: Record) -> None:
    state.node.phase = "draining"
    state.node.drain_deadline_ns = event.deadline_ns
    state.touch("node", 0)


@_folds(ev.NodeStopped)
def _(state: ClusterState, event: ev.NodeStopped, record: Record) -> None:
    state.node.phase = "stopped"
    state.touch("node", 0)


# Replicas and their workers.


@_folds(ev.ReplicaRegistered)
def _(state: ClusterState, event: ev.ReplicaRegistered, record: Record) -> None:
    replica = state.replicas.get(event.replica)
    if replica is None:
        replica = Replica(event.replica, event.node, event.role, since_seq=record.seq)
        replica.cause_seq = record.cause
        state.replicas[event.replica] = replica
    replica.role, replica.node = event.role, event.node
    state.touch("replica", event.replica)


@_folds(ev.ReplicaRetired)
def _(state: ClusterState, event: ev.ReplicaRetired, record: Record) -> None:
    replica = _replica(state, event.replica)
    if replica.worker != "absent":
        raise IllegalEvent(f"replica {replica.id} has a worker ({replica.worker})")
    del state.replicas[replica.id]
    state.touch("replica", replica.id)


@_folds(ev.WorkerSpawning)
def _(state: ClusterState, event: ev.WorkerSpawning, record: Record) -> None:
    replica = _replica(state, event.replica)
    if replica.worker != "absent" or event.epoch != replica.epoch + 1:
        raise IllegalEvent(
            f"replica {replica.id} has worker {replica.worker} of epoch {replica.epoch}:"
            f" cannot spawn epoch {event.epoch}"
        )
    replica.epoch, replica.worker, replica.pid = event.epoch, "spawning", 0
    state.touch("replica", replica.id)


@_folds(ev.WorkerSpawned)
def _(state: ClusterState, event: ev.WorkerSpawned, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    replica.worker, replica.pid = "spawned", event.pid
    state.touch("replica", replica.id)


@_folds(ev.WorkerAttached)
def _(state: ClusterState, event: ev.WorkerAttached, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    _move(replica, "attach", record)
    replica.worker, replica.pid = "attached", event.pid
    state.touch("replica", replica.id)


@_folds(ev.WorkerLost)
def _(state: ClusterState, event: ev.WorkerLost, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    _move(replica, "lose", record)
    replica.worker, replica.pid = "absent", 0
    replica.failures += 1
    replica.retry_ns = event.retry_ns
    _forget_weights(replica)
    state.touch("replica", replica.id)


def _forget_weights(replica: Replica) -> None:
    replica.digest = replica.source = ""
    replica.layers_ready = replica.bytes_loaded = 0
    replica.blocks_total = replica.blocks_sampled = replica.running_sampled = 0


@_folds(ev.LoadStarted)
def _(state: ClusterState, event: ev.LoadStarted, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    _move(replica, f"load_{event.role}", record)
    _forget_weights(replica)
    replica.source = event.source
    state.touch("replica", replica.id)


@_folds(ev.LoadProgressed)
def _(state: ClusterState, event: ev.LoadProgressed, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    replica.layers_ready, replica.layers_total = event.layers_ready, event.layers_total
    replica.bytes_loaded, replica.bytes_total = event.bytes_loaded, event.bytes_total
    state.touch("replica", replica.id)


@_folds(ev.LoadFinished)
def _(state: ClusterState, event: ev.LoadFinished, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    _move(replica, "loaded", record)
    replica.digest, replica.source = event.digest, event.source
    replica.layers_ready = replica.layers_total = event.layers_total
    replica.bytes_loaded = replica.bytes_total = event.bytes_total
    replica.block_tokens, replica.blocks_total = event.block_tokens, event.blocks_total
    replica.failures = 0
    state.touch("replica", replica.id)


@_folds(ev.LoadFailed)
def _(state: ClusterState, event: ev.LoadFailed, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    _move(replica, "load_failed", record)
    replica.failures += 1
    replica.retry_ns = event.retry_ns
    _forget_weights(replica)
    state.touch("replica", replica.id)


@_folds(ev.DecodeOpened)
def _(state: ClusterState, event: ev.DecodeOpened, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    _move(replica, "open", record)
    state.touch("replica", replica.id)


@_folds(ev.OccupancySampled)
def _(state: ClusterState, event: ev.OccupancySampled, record: Record) -> None:
    replica = _replica(state, event.replica, event.epoch)
    replica.blocks_sampled, replica.running_sampled = event.blocks_used, event.running
    state.touch("replica", replica.id)


@_folds(ev.StaleNoticeIgnored)
def _(state: ClusterState, event: ev.StaleNoticeIgnored, record: Record) -> None:
    _count(state, "stale_notices")


# Requests.


@_folds(ev.RequestAccepted)
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
    )
    state.touch("request", event.request_id)


@_folds(ev.RequestRejected)
def _(state: ClusterState, event: ev.RequestRejected, record: Record) -> None:
    _count(state, RequestState.REJECTED.value)


@_folds(ev.PrefillStarted)
def _(state: ClusterState, event: ev.PrefillStarted, record: Record) -> None:
    request = _request(state, event.request_id)
    _serving(state, event.replica, event.epoch, ReplicaState.PREFILL)
    request.state = next_request_state(request.id, request.state, "prefill")
    request.source, request.source_epoch = event.replica, event.epoch
    request.source_blocks = event.blocks
    state.touch("request", request.id)


def _serving(state: ClusterState, replica_id: str, epoch: int, wanted: ReplicaState) -> Replica:
    replica = _replica(state, replica_id, epoch)
    if replica.state is not wanted:
        raise IllegalEvent(f"replica {replica.id} is {replica.state}, not {wanted}")
    return replica


@_folds(ev.PrefillFinished)
def _(state: ClusterState, event: ev.PrefillFinished, record: Record) -> None:
    request = _request(state, event.request_id)
    request.state = next_request_state(request.id, request.state, "first_token")
    state.touch("request", request.id)


@_folds(ev.MigrationStarted)
def _(state: ClusterState, event: ev.MigrationStarted, record: Record) -> None:
    request = _request(state, event.request_id)
    if request.state is not RequestState.MIGRATING or request.lease_id:
        raise IllegalEvent(
            f"request {request.id} is {request.state} with lease {request.lease_id}:"
            " it takes no KV lease"
        )
    if event.lease_id != state.node.next_lease:
        raise IllegalEvent(f"lease {event.lease_id} is out of order ({state.node.next_lease})")
    _serving(state, event.target, event.target_epoch, ReplicaState.DECODE)
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
    )
    state.node.next_lease += 1
    state.touch("node", 0)
    state.touch("request", request.id)
    state.touch("lease", event.lease_id)


@_folds(ev.MigrationFinished)
def _(state: ClusterState, event: ev.MigrationFinished, record: Record) -> None:
    lease = _lease(state, event.lease_id)
    request = _request(state, lease.request_id)
    request.state = next_request_state(request.id, request.state, "arrived")
    request.source, request.source_epoch, request.source_blocks = "", 0, 0
    _close(state, lease, request)


@_folds(ev.MigrationFailed)
def _(state: ClusterState, event: ev.MigrationFailed, record: Record) -> None:
    lease = _lease(state, event.lease_id)
    request = _request(state, lease.request_id)
    request.target, request.target_epoch, request.target_blocks = "", 0, 0
    request.retry_ns = event.retry_ns
    _close(state, lease, request)


def _close(state: ClusterState, lease: Lease, request: Request) -> None:
    del state.leases[lease.id]
    request.lease_id = 0
    state.touch("lease", lease.id)
    state.touch("request", request.id)


@_folds(ev.RequestFinished)
def _(state: ClusterState, event: ev.RequestFinished, record: Record) -> None:
    _end(state, event.request_id, "finish")


@_folds(ev.RequestFailed)
def _(state: ClusterState, event: ev.RequestFailed, record: Record) -> None:
    _end(state, event.request_id, "fail")


@_folds(ev.RequestCancelled)
def _(state: ClusterState, event: ev.RequestCancelled, record: Record) -> None:
    _end(state, event.request_id, "cancel")


def _end(state: ClusterState, request_id: int, trigger: str) -> None:
    request = _request(state, request_id)
    end = next_request_state(request.id, request.state, trigger)
    if request.lease_id:
        state.touch("lease", request.lease_id)
        del state.leases[request.lease_id]
    del state.requests[request.id]
    state.touch("request", request.id)
    _count(state, end.value)
