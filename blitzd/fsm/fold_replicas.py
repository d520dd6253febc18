"""Folders of replicas and their workers: registration, life, loads, samples."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm import flow, load_plan
from blitzd.fsm.entities import Replica
from blitzd.fsm.fold_requests import forget_rest
from blitzd.fsm.folding import (
    IllegalEvent,
    count,
    folds,
    forget_links,
    forget_weights,
    move,
    replica_of,
    require_idle,
)
from blitzd.fsm.request import RequestState
from blitzd.fsm.state import ClusterState


@folds(ev.ReplicaRegistered)
def _(state: ClusterState, event: ev.ReplicaRegistered, record: Record) -> None:
    replica = state.replicas.get(event.replica)
    if replica is None:
        replica = Replica(event.replica, event.node, event.role, event.role)
        replica.since_seq, replica.cause_seq = record.seq, record.cause
        agent = state.agents.get(event.node)
        replica.epoch = 0 if agent is None else agent.epoch_floor
        state.replicas[event.replica] = replica
    replica.role = replica.configured = event.role
    replica.node = event.node
    state.touch("replica", event.replica)


@folds(ev.ReplicaRetired)
def _(state: ClusterState, event: ev.ReplicaRetired, record: Record) -> None:
    replica = replica_of(state, event.replica)
    if replica.worker != "absent":
        raise IllegalEvent(f"replica {replica.id} has a worker ({replica.worker})")
    agent = state.agents.get(replica.node)
    if agent is not None and agent.epoch_floor < replica.epoch:
        agent.epoch_floor = replica.epoch
        state.touch("agent", agent.node)
    del state.replicas[replica.id]
    state.touch("replica", replica.id)


@folds(ev.WorkerSpawning)
def _(state: ClusterState, event: ev.WorkerSpawning, record: Record) -> None:
    replica = replica_of(state, event.replica)
    if replica.worker != "absent" or event.epoch != replica.epoch + 1:
        raise IllegalEvent(
            f"replica {replica.id} has worker {replica.worker} of epoch {replica.epoch}:"
            f" cannot spawn epoch {event.epoch}"
        )
    replica.epoch, replica.worker, replica.pid = event.epoch, "spawning", 0
    state.touch("replica", replica.id)


@folds(ev.WorkerSpawned)
def _(state: ClusterState, event: ev.WorkerSpawned, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    replica.worker, replica.pid = "spawned", event.pid
    state.touch("replica", replica.id)


@folds(ev.WorkerAttached)
def _(state: ClusterState, event: ev.WorkerAttached, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, "attach", record)
    if replica.worker == "awaited":
        replica.trouble = ""
    replica.worker, replica.pid = "attached", event.pid
    replica.attached_ns = record.mono_ns
    state.touch("replica", replica.id)


@folds(ev.WorkerLost)
def _(state: ClusterState, event: ev.WorkerLost, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, "lose", record)
    replica.failures = replica.failures_at(record.mono_ns) + 1
    replica.worker, replica.pid, replica.attached_ns = "absent", 0, 0
    replica.trouble = event.reason
    replica.retry_ns = event.retry_ns
    replica.drain_deadline_ns = replica.dirty_ns = replica.audits_failed = 0
    forget_weights(replica)
    forget_links(state, replica.id)
    for request in state.requests_on(replica.id):
        if request.state is RequestState.PREFILLING and request.rest == replica.id:
            forget_rest(request)  # nobody goes on with it: it ends where it is
            state.touch("request", request.id)
    state.touch("replica", replica.id)


@folds(ev.WorkerStopping)
def _(state: ClusterState, event: ev.WorkerStopping, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    require_idle(state, replica)
    if replica.worker in ("absent", "stopping"):
        raise IllegalEvent(f"replica {replica.id} has worker {replica.worker}: nothing to stop")
    move(replica, "stop", record)
    replica.worker, replica.attached_ns = "stopping", 0
    replica.null_ns = replica.drain_deadline_ns = 0
    if not replica.cordoned:
        replica.null_role = ""
    forget_weights(replica)
    state.touch("replica", replica.id)


@folds(ev.WorkerStopped)
def _(state: ClusterState, event: ev.WorkerStopped, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if replica.worker != "stopping":
        raise IllegalEvent(f"replica {replica.id} has worker {replica.worker}, not stopping")
    replica.worker, replica.pid = "absent", 0
    replica.failures = replica.retry_ns = 0
    replica.trouble = ""
    state.touch("replica", replica.id)


@folds(ev.LoadStarted)
def _(state: ClusterState, event: ev.LoadStarted, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, f"load_{event.role}", record)
    forget_weights(replica)
    replica.source, replica.peers = event.source, event.peers
    replica.shards = event.shards
    load_plan.begin(state, replica, event.rung, event.skipped)
    state.touch("replica", replica.id)


@folds(ev.LoadProgressed)
def _(state: ClusterState, event: ev.LoadProgressed, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if replica.peers:
        replica.source = event.source or replica.source
    flow.weights_moved(state, replica, event.bytes_loaded)
    replica.layers_ready, replica.layers_total = event.layers_ready, event.layers_total
    replica.bytes_loaded, replica.bytes_total = event.bytes_loaded, event.bytes_total
    if event.blocks_total:
        replica.block_tokens, replica.blocks_total = event.block_tokens, event.blocks_total
    state.touch("replica", replica.id)


@folds(ev.LoadFinished)
def _(state: ClusterState, event: ev.LoadFinished, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, event.trigger, record)
    flow.weights_moved(state, replica, event.bytes_total)
    replica.digest, replica.source = event.digest, event.source
    replica.layers_ready = replica.layers_total = event.layers_total
    replica.bytes_loaded = replica.bytes_total = event.bytes_total
    replica.block_tokens, replica.blocks_total = event.block_tokens, event.blocks_total
    replica.failures, replica.trouble = 0, ""
    replica.peers, replica.shards, replica.peer_failures = (), (), 0
    replica.rung, replica.skipped = "", ()
    state.touch("replica", replica.id)


@folds(ev.LoadFailed)
def _(state: ClusterState, event: ev.LoadFailed, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, "load_failed", record)
    replica.failures += 1
    replica.peer_failures = replica.peer_failures + 1 if replica.peers else 0
    replica.trouble = event.reason
    replica.retry_ns = event.retry_ns
    forget_weights(replica)
    state.touch("replica", replica.id)


@folds(ev.DecodeOpened)
def _(state: ClusterState, event: ev.DecodeOpened, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    move(replica, "open", record)
    state.touch("replica", replica.id)


@folds(ev.OccupancySampled)
def _(state: ClusterState, event: ev.OccupancySampled, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    replica.blocks_sampled, replica.running_sampled = event.blocks_used, event.running
    state.touch("replica", replica.id)


@folds(ev.StaleNoticeIgnored)
def _(state: ClusterState, event: ev.StaleNoticeIgnored, record: Record) -> None:
    count(state, "stale_notices")
