"""Decisions about replicas: boot, worker life, loading."""

from blitzd.control import host_cache, loads, topology
from blitzd.control.commands import EndWorker, ResetWorker, SpawnWorker
from blitzd.control.resume import leave
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Agent, Replica, ReplicaState
from blitzd.fsm.table import LOADING, WITHOUT_WEIGHTS


def booted(turn: Turn, boot: ev.Booted) -> None:
    """Takes up the state of the last boot: what it was doing for clients ended with it, its
    workers are kept if they still answer."""
    turn.emit(
        ev.NodeStarted(boot.boot_epoch, boot.version, boot.node, boot.policy, boot.core_version)
    )
    topology.describe(turn, boot.topology)
    for request in list(turn.state.requests.values()):
        turn.emit(ev.RequestFailed(request.id, "daemon_restarted", "the daemon was restarted"))
    adopted = {(replica, epoch, pid) for replica, epoch, pid in boot.adopted}
    for replica in list(turn.state.replicas.values()):
        if replica.worker == "absent" or replica.node in turn.state.agents:
            continue
        if (replica.id, replica.epoch, replica.pid) in adopted:
            if replica.worker != "attached":
                turn.emit(ev.WorkerAttached(replica.id, replica.epoch, replica.pid))
            turn.command(ResetWorker(replica.id, replica.epoch))
        else:
            turn.command(EndWorker(replica.id, replica.epoch))
            lose(turn, replica, "not there, or not usable, when the daemon came back")
    _reconfigure(turn, boot)


def _reconfigure(turn: Turn, boot: ev.Booted) -> None:
    """Of this node: what others offer their agents say."""
    wanted = dict(boot.replicas)
    ours = [r for r in turn.state.replicas.values() if r.node not in turn.state.agents]
    for gone in [r for r in ours if r.id not in wanted]:
        if gone.worker != "absent":
            turn.command(EndWorker(gone.id, gone.epoch))
            lose(turn, gone, "the configuration no longer names this replica")
        turn.emit(ev.ReplicaRetired(gone.id))
    for replica_id, role in boot.replicas:
        known = turn.state.replicas.get(replica_id)
        if known is None or (known.configured, known.node) != (role, boot.node):
            if known is not None and known.state not in WITHOUT_WEIGHTS:
                turn.command(EndWorker(known.id, known.epoch))
                lose(turn, known, f"the configuration makes it {role}")
            turn.emit(ev.ReplicaRegistered(replica_id, boot.node, role))


def worker_started(turn: Turn, started: ev.WorkerStarted) -> None:
    replica = turn.current(started.replica, started.epoch)
    if replica is None:
        # Its start was held up, by a full disk say, until its node or replica was given up:
        # nobody else ends it.
        turn.command(EndWorker(started.replica, started.epoch))
    elif replica.worker == "spawning":
        turn.emit(ev.WorkerSpawned(started.replica, started.epoch, started.pid))


def worker_described(turn: Turn, described: ev.WorkerDescribed) -> None:
    replica = turn.current(described.replica, described.epoch)
    if replica is None:
        # As above, and the word of its start was lost.
        turn.command(EndWorker(described.replica, described.epoch))
    elif replica.worker in ("spawning", "spawned"):
        turn.emit(ev.WorkerAttached(described.replica, described.epoch, described.pid))


def worker_exited(turn: Turn, exited: ev.WorkerExited) -> None:
    replica = turn.current(exited.replica, exited.epoch)
    if replica is None:
        return
    if replica.worker == "stopping":
        turn.emit(ev.WorkerStopped(replica.id, replica.epoch, exited.reason))
        return
    leave(turn, replica, "worker_lost", exited.reason)
    lose(turn, replica, exited.reason)


def lose(turn: Turn, replica: Replica, reason: str) -> None:
    break_pair(turn, replica, f"replica {replica.id} was lost")
    turn.emit(ev.WorkerLost(replica.id, replica.epoch, reason, _retry_ns(turn, replica)))


def lose_node(turn: Turn, agent: Agent, reason: str) -> None:
    """Takes the node's replicas away, their requests first."""
    why = f"node {agent.node}: {reason}"
    for replica in [r for r in turn.state.replicas.values() if r.node == agent.node]:
        if replica.worker != "absent":
            leave(turn, replica, "worker_lost", why)
            turn.command(EndWorker(replica.id, replica.epoch))
            lose(turn, replica, why)
        turn.emit(ev.ReplicaRetired(replica.id))
    turn.emit(ev.NodeLost(agent.node, agent.epoch, reason))


def break_pair(turn: Turn, replica: Replica, reason: str) -> None:
    """Before the event that takes one side away, so that no state has half of a pair."""
    if replica.pair_id:
        turn.emit(ev.PairBroken(replica.pair_id, reason))


def _retry_ns(turn: Turn, replica: Replica) -> int:
    """At once after the first failure, then a doubling back-off: a worker that cannot
    start must not keep the machine busy with trying."""
    failures = replica.failures_at(turn.mono_ns)
    if not failures:
        return turn.mono_ns
    doubled = turn.policy.restart_backoff_ms << min(failures - 1, 16)
    return turn.mono_ns + min(doubled, turn.policy.restart_backoff_max_ms) * MS


def load_moved(turn: Turn, moved: ev.LoadMoved) -> None:
    replica = turn.current(moved.replica, moved.epoch)
    if replica is None:
        return
    if replica.state not in LOADING:
        turn.ignore(moved.replica, moved.epoch)
        return
    turn.emit(
        ev.LoadProgressed(
            moved.replica,
            moved.epoch,
            moved.layers_ready,
            moved.layers_total,
            moved.bytes_loaded,
            moved.bytes_total,
            moved.source,
            moved.block_tokens,
            moved.blocks_total,
        )
    )


def load_ended(turn: Turn, ended: ev.LoadEnded) -> None:
    replica = turn.current(ended.replica, ended.epoch)
    if replica is None:
        return
    if replica.state not in LOADING:
        turn.ignore(ended.replica, ended.epoch)
    elif ended.reason:
        # What it had begun, or held half of, went with the load.
        leave(turn, replica, "engine_error", f"its load failed: {ended.reason}")
        break_pair(turn, replica, f"the load of {replica.id} failed")
        turn.emit(ev.LoadFailed(replica.id, replica.epoch, ended.reason, _retry_ns(turn, replica)))
    else:
        turn.emit(
            ev.LoadFinished(
                ended.replica,
                ended.epoch,
                ended.digest,
                ended.source,
                ended.layers_total,
                ended.bytes_total,
                ended.block_tokens,
                ended.blocks_total,
                _trigger_of(turn, replica),
            )
        )
        host_cache.keep(turn, replica)
        if turn.state.replicas[replica.id].state is ReplicaState.AUS_DECODE:
            turn.emit(ev.DecodeOpened(replica.id, replica.epoch))


def _trigger_of(turn: Turn, replica: Replica) -> str:
    if replica.role == "colocated":
        return "loaded_colocated"
    if replica.role == "decode" and turn.policy.mutate_after_load:
        return "loaded_to_mutate"
    return "loaded"


def occupancy_reported(turn: Turn, report: ev.OccupancyReported) -> None:
    replica = turn.current(report.replica, report.epoch)
    if replica is None:
        return
    sampled = (replica.blocks_sampled, replica.running_sampled)
    if replica.blocks_total and sampled != (report.blocks_used, report.running):
        turn.emit(
            ev.OccupancySampled(report.replica, report.epoch, report.blocks_used, report.running)
        )


def tend(turn: Turn) -> None:
    """Starts what the configuration wants and is not there: workers, then their loads."""
    node = turn.state.node
    # While draining only for the sake of what is still running.
    if node.phase != "running" and not (node.phase == "draining" and turn.state.requests):
        return
    to_load = []
    for replica_id in sorted(turn.state.index.idle_workers):
        replica = turn.state.replicas[replica_id]
        if turn.mono_ns < replica.retry_ns:
            continue
        if replica.worker == "absent":
            turn.emit(ev.WorkerSpawning(replica.id, replica.epoch + 1))
            agent = replica.node if replica.node in turn.state.agents else ""
            turn.command(SpawnWorker(replica.id, replica.epoch, agent))
        else:
            to_load.append(replica)
    loads.start(turn, to_load)
