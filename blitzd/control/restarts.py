"""Planned restarts: of one replica, and of all in turn.

A restart is a mark on the replica (the epoch that is to end), and every turn takes it one
step on: a stand-in where nobody else has its role, the drain, the end of the worker, the
next worker's load. So it goes on after a crash of the daemon, and replays.
"""

from blitzd.control import ladder, moves
from blitzd.control.moves import SERVING_AS, SHUTTING, STOPPABLE_LOADS, refuse
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica, ReplicaState

S = ReplicaState

STOPS = (S.INACTIVE, S.FAILED, *STOPPABLE_LOADS, S.SHUTTING_NULL)
"""Where nothing is served, so that the worker may end."""
IN_PAIR = (S.NEW_PREFILL, S.REFACTORY_PREFILL, S.OLD_PREFILL)
DOES = {
    "prefill": (S.PREFILL, S.COLOCATED),
    "decode": (S.DECODE, S.COLOCATED),
    "colocated": (S.COLOCATED,),
}
"""Who serves what one of this role serves."""


def restart_requested(turn: Turn, wanted: ev.RestartRequested) -> None:
    replica = moves.named(turn, "restart", wanted.replica)
    if replica is None or replica.restart_epoch:
        return
    if replica.state in IN_PAIR:
        refuse(turn, "restart", replica.id, half_of_a_pair(replica))
    else:
        _begin(turn, replica, wanted.drain_ms)


def half_of_a_pair(replica: Replica) -> str:
    """Why no command takes one side away: the other would lose its work."""
    return f"it is {replica.state}, half of a live pair, until that settles"


def _begin(turn: Turn, replica: Replica, drain_ms: int) -> None:
    drain_ms = drain_ms or turn.policy.drain_ms
    turn.emit(ev.RestartStarted(replica.id, replica.epoch, drain_ms))


def end(turn: Turn, replica: Replica, reason: str) -> None:
    took_ns = turn.mono_ns - replica.restart_ns
    turn.emit(ev.RestartEnded(replica.id, replica.epoch, reason, took_ns))


def rolling_restart_requested(turn: Turn, wanted: ev.RollingRestartRequested) -> None:
    if turn.state.node.rolling:
        return
    epochs = tuple((r.id, r.epoch) for r in turn.state.replicas.values())
    turn.emit(ev.RollingRestartStarted(epochs, wanted.drain_ms or turn.policy.drain_ms))


def rolling_restart_stop_requested(turn: Turn, _: ev.RollingRestartStopRequested) -> None:
    """Those that restart go on; no other follows."""
    if turn.state.node.rolling:
        turn.emit(ev.RollingRestartEnded("called off"))


def advance(turn: Turn) -> None:
    """Takes every restart, and all that stand in for one, as far as they can go now."""
    if turn.state.node.phase != "running":
        _call_off(turn)
        return
    _roll(turn)
    for replica_id in sorted(turn.state.index.restarting):
        replica = turn.state.replicas[replica_id]
        if replica.restart_epoch:
            _restart(turn, replica)
        if replica.stands_in and not _restarts(turn, replica.stands_in):
            _release(turn, replica)


def _call_off(turn: Turn) -> None:
    """A node that stops restarts nobody any more: who still has its worker serves on, since
    somebody who was accepted may wait for it."""
    for replica_id in sorted(turn.state.index.restarting):
        replica = turn.state.replicas[replica_id]
        if replica.restart_epoch == replica.epoch and replica.state in SHUTTING:
            end(turn, replica, "the node stops")
            if not replica.cordoned:
                moves.revive(turn, replica)


def _release(turn: Turn, stand_in: Replica) -> None:
    """It goes, unless the one that it stood in for is drained now, or did not come back."""
    turn.emit(ev.StandInReleased(stand_in.id))
    if _served_by_another(turn, stand_in):
        moves.lower(turn, stand_in, "stand-in")


def _served_by_another(turn: Turn, replica: Replica) -> bool:
    does = DOES.get(replica.role, ())
    others = turn.state.in_states(*does)
    return any(other is not replica and not other.restart_epoch for other in others)


def _restarts(turn: Turn, replica_id: str) -> bool:
    replica = turn.state.replicas.get(replica_id)
    return replica is not None and bool(replica.restart_epoch)


# One replica.


def _restart(turn: Turn, replica: Replica) -> None:
    if replica.epoch != replica.restart_epoch or replica.worker == "stopping":
        _await_return(turn, replica)
    elif replica.state in SERVING_AS.values():
        if _covered(turn, replica):
            deadline_ns = turn.mono_ns + replica.restart_drain_ms * MS
            moves.shut(turn, replica, "restart", deadline_ns)
    elif replica.state in STOPS and replica.worker not in ("absent", "awaited"):
        moves.stop(turn, replica, "restart")


def _await_return(turn: Turn, replica: Replica) -> None:
    idle = replica.role == "spare" and replica.worker == "attached"
    if idle or replica.state is SERVING_AS.get(replica.role):
        end(turn, replica, "")
        return
    # The mark says since when it restarts: waiting for a stand-in and the drain come before.
    limit_ms = 2 * replica.restart_drain_ms + turn.policy.restart_limit_ms
    if turn.mono_ns >= replica.restart_ns + limit_ms * MS:
        why = replica.trouble or f"it is {replica.state} with worker {replica.worker}"
        rolling = replica.id in turn.state.node.rolling
        end(turn, replica, f"not back after {limit_ms} ms: {why}")
        if rolling:
            # No reason to take down the next one too.
            turn.emit(ev.RollingRestartEnded(f"{replica.id} did not come back"))


def _covered(turn: Turn, replica: Replica) -> bool:
    """Whether it may go: another has its role, or nobody can take it in good time."""
    if _served_by_another(turn, replica):
        return True
    if turn.mono_ns >= replica.restart_ns + replica.restart_drain_ms * MS:
        return True
    others = [r for r in turn.state.replicas.values() if r is not replica]
    if any(r.stands_in == replica.id for r in others):
        return False
    raised = ladder.climb(turn, replica.role, 1, at_once=True)
    if not raised:
        return True
    [stand_in] = raised
    turn.emit(ev.StandInCalled(stand_in.id, replica.id))
    return stand_in.state in DOES[replica.role]


# All, in turn.


def _roll(turn: Turn) -> None:
    """Begins the next restarts: one of each role at a time, one stand-in at a time, and the
    spares last, since they stand in for the others."""
    node = turn.state.node
    if not node.rolling:
        return
    replicas = list(turn.state.replicas.values())
    waiting = [r for r in replicas if node.rolling.get(r.id) == r.epoch and not r.restart_epoch]
    busy = {r.role for r in replicas if r.restart_epoch}
    if not waiting and not any(r.restart_epoch for r in replicas if r.id in node.rolling):
        turn.emit(ev.RollingRestartEnded(""))
        return
    serving = [r for r in waiting if r.role != "spare"]
    for replica in serving or waiting:
        if replica.role in busy or replica.stands_in or replica.state in IN_PAIR:
            continue
        if any(r.stands_in for r in replicas):
            break
        _begin(turn, replica, node.rolling_drain_ms)
        busy.add(replica.role)
        _restart(turn, replica)
