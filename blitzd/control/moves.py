"""The moves that commands, scaling and restarts are made of, each one event or a few."""

from typing import NamedTuple

from blitzd.control.commands import EndWorker, ResetWorker
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica, ReplicaState

S = ReplicaState
ROLES = ("prefill", "decode", "colocated", "spare")
SHUTTING = (S.SHUTTING_PREFILL, S.SHUTTING_DECODE)
SERVING_AS = {"prefill": S.PREFILL, "decode": S.DECODE, "colocated": S.COLOCATED}
STOPPABLE_LOADS = (S.LOADING_PREFILL, S.LOADING_DECODE)


def named(turn: Turn, command: str, replica_id: str) -> Replica | None:
    """The replica that a command is about; one that is not there is refused."""
    replica = turn.state.replicas.get(replica_id)
    if replica is None:
        known = ", ".join(sorted(turn.state.replicas))
        reason = f"no such replica; there are {known}"
        turn.emit(ev.CommandRefused(command, replica_id, reason, "unknown_replica", "replica"))
    return replica


def refuse(turn: Turn, command: str, replica_id: str, reason: str) -> None:
    """It does not fit the state as it is; it may at another time."""
    turn.emit(ev.CommandRefused(command, replica_id, reason))


def refuse_value(turn: Turn, command: str, replica_id: str, field: str, reason: str) -> None:
    """It will not be accepted at any time."""
    turn.emit(ev.CommandRefused(command, replica_id, reason, "invalid", field))


def shut(turn: Turn, replica: Replica, reason: str, deadline_ns: int = 0) -> None:
    """It takes nothing new from here on. Without a deadline it has the policy's."""
    deadline_ns = deadline_ns or turn.mono_ns + turn.policy.drain_ms * MS
    turn.emit(ev.ShutdownStarted(replica.id, replica.epoch, reason, deadline_ns))


class Step(NamedTuple):
    """Where on the ladder a replica was found; by default an operator named it."""

    rung: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    """(rung, why it did not apply) of those before."""


NAMED = Step()


def revive(turn: Turn, replica: Replica, step: Step = NAMED) -> None:
    role = replica.null_role
    trigger = "revive_colocated" if role == "colocated" else "revive"
    turn.emit(ev.ReplicaRevived(replica.id, replica.epoch, role, trigger, *step))
    _open_decode(turn, replica)


def reuse(turn: Turn, replica: Replica, role: str, step: Step = NAMED) -> None:
    turn.emit(ev.NullReused(replica.id, replica.epoch, role, *step))
    _open_decode(turn, replica)


def _open_decode(turn: Turn, replica: Replica) -> None:
    if replica.state is S.AUS_DECODE:
        turn.emit(ev.DecodeOpened(replica.id, replica.epoch))


def deactivate(turn: Turn, replica: Replica, reason: str) -> None:
    turn.emit(ev.ReplicaDeactivated(replica.id, replica.epoch, reason))
    turn.command(ResetWorker(replica.id, replica.epoch, unload=True))


def stop(turn: Turn, replica: Replica, reason: str) -> None:
    """Ends a worker that serves nothing. Its successor is spawned when it is gone, so that
    two never share the machine's memory."""
    turn.emit(ev.WorkerStopping(replica.id, replica.epoch, reason))
    turn.command(EndWorker(replica.id, replica.epoch, report=True))


def assign(turn: Turn, replica: Replica, role: str) -> None:
    """Of a replica that serves nothing. A load for another role is broken off with its
    worker, since a late answer must not be taken for one about the next load."""
    if replica.state in STOPPABLE_LOADS:
        stop(turn, replica, f"its load is broken off: it is to be {role}")
    turn.emit(ev.RoleAssigned(replica.id, role))


def lower(turn: Turn, replica: Replica, reason: str) -> bool:
    """Makes a spare of it, in the cheapest way that loses nothing. False: not as it is."""
    if replica.state in (S.INACTIVE, S.FAILED, *STOPPABLE_LOADS):
        assign(turn, replica, "spare")
    elif replica.state is S.DECODE and not turn.state.requests_on(replica.id):
        turn.emit(ev.ReplicaExpired(replica.id, replica.epoch, reason))
    elif replica.state in SERVING_AS.values():
        shut(turn, replica, reason)
    else:
        return False
    return True
