"""Decisions about roles: operators' commands, and what follows when a replica that drains,
mutates or pairs has nothing left to wait for."""

from blitzd.control import loads, moves, pairs, presets, restarts, scaling
from blitzd.control.commands import DecodeLocally
from blitzd.control.moves import (
    ROLES,
    SERVING_AS,
    SHUTTING,
    STOPPABLE_LOADS,
    named,
    refuse,
    refuse_value,
)
from blitzd.control.policy import Policy
from blitzd.control.restarts import IN_PAIR, half_of_a_pair
from blitzd.control.resume import fail, leave, resume
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica, ReplicaState, Request, RequestState

S = ReplicaState


# Operators' commands. Each is idempotent; one that does not fit is refused by name.


def drain_requested(turn: Turn, wanted: ev.DrainRequested) -> None:
    replica = named(turn, "drain", wanted.replica)
    if replica is None:
        return
    if replica.state in SERVING_AS.values():
        moves.shut(turn, replica, "drain", wanted.deadline_ns)
    elif replica.state in SHUTTING:
        _drain_shutting(turn, replica, wanted.deadline_ns)
    elif replica.cordoned:
        return
    elif replica.state in STOPPABLE_LOADS:
        moves.stop(turn, replica, "drain")
        turn.emit(ev.ReplicaCordoned(replica.id, 0))
    elif replica.state is S.SHUTTING_NULL or _waits_for_weights(replica):
        turn.emit(ev.ReplicaCordoned(replica.id, 0))
    elif replica.state in IN_PAIR:
        refuse(turn, "drain", replica.id, half_of_a_pair(replica))
    else:
        refuse(turn, "drain", replica.id, f"it is {replica.state} and serves nothing")


def _waits_for_weights(replica: Replica) -> bool:
    return replica.state in (S.INACTIVE, S.FAILED) and replica.role != "spare"


def _drain_shutting(turn: Turn, replica: Replica, deadline_ns: int) -> None:
    """A deadline moves to an earlier time only, so that repeating a drain changes nothing."""
    deadline_ns = min(deadline_ns or replica.drain_deadline_ns, replica.drain_deadline_ns)
    if not replica.cordoned or deadline_ns < replica.drain_deadline_ns:
        turn.emit(ev.ReplicaCordoned(replica.id, deadline_ns))


def undrain_requested(turn: Turn, wanted: ev.UndrainRequested) -> None:
    replica = named(turn, "undrain", wanted.replica)
    if replica is None:
        return
    back = replica.null_role or replica.configured
    if replica.restart_epoch == replica.epoch and replica.state in _CAN_STAY:
        restarts.end(turn, replica, "undrained")
    if replica.state in SHUTTING:
        moves.revive(turn, replica)
    elif replica.state is S.SHUTTING_NULL:
        moves.reuse(turn, replica, back)
    elif replica.cordoned:
        turn.emit(ev.RoleAssigned(replica.id, back))


_CAN_STAY = (*SERVING_AS.values(), *SHUTTING)


def role_requested(turn: Turn, wanted: ev.RoleRequested) -> None:
    replica = named(turn, "role", wanted.replica)
    if replica is None:
        return
    if wanted.role not in ROLES:
        reason = f"role {wanted.role!r}: one of {', '.join(ROLES)} is accepted"
        refuse_value(turn, "role", replica.id, "role", reason)
        return
    if replica.role == wanted.role:
        if replica.stands_in:
            # It keeps the role then, whoever comes back.
            turn.emit(ev.StandInReleased(replica.id))
        return
    left = "" if replica.stands_in else replica.role
    match replica.state, wanted.role:
        case ((S.INACTIVE | S.FAILED | S.LOADING_PREFILL | S.LOADING_DECODE), _):
            moves.assign(turn, replica, wanted.role)
        case S.SHUTTING_NULL, _:
            moves.reuse(turn, replica, wanted.role)
        case ((S.SHUTTING_PREFILL | S.SHUTTING_DECODE), role) if role == replica.null_role:
            moves.revive(turn, replica)
        case (S.PREFILL, "decode") | (S.DECODE, "prefill"):
            turn.emit(ev.MutationStarted(replica.id, replica.epoch, wanted.role))
        case ((S.PREFILL | S.DECODE | S.COLOCATED), "spare"):
            moves.shut(turn, replica, "role")
        case state, _ if state in IN_PAIR:
            refuse(turn, "role", replica.id, half_of_a_pair(replica))
            return
        case _:
            reason = f"it is {replica.state}, which does not turn into {wanted.role} now"
            refuse(turn, "role", replica.id, reason)
            return
    scaling.follow(turn, left, wanted.role)


def deactivate_requested(turn: Turn, wanted: ev.DeactivateRequested) -> None:
    replica = named(turn, "deactivate", wanted.replica)
    if replica is None or replica.state is S.INACTIVE:
        return
    if replica.id in turn.state.feeding():
        refuse(turn, "deactivate", replica.id, "another replica is getting its weights from it")
    elif replica.state is S.SHUTTING_NULL:
        moves.deactivate(turn, replica, "plan")
    else:
        reason = f"it is {replica.state}; only an empty one gives up its weights: drain it first"
        refuse(turn, "deactivate", replica.id, reason)


def policy_requested(turn: Turn, wanted: ev.PolicyRequested) -> None:
    bounds = turn.policy.bounds()
    values = dict(turn.policy.pairs())
    for name, new in wanted.values:
        least, most = bounds.get(name, (0, -1))
        if name not in bounds:
            reason = f"no such value; there are {', '.join(sorted(bounds))}"
        elif not least <= new <= most:
            reason = f"{name} is {new}; accepted: an integer from {least} to {most}"
        else:
            continue
        refuse_value(turn, "policy", "", name, reason)
        return
    try:
        preset = presets.expand(wanted.preset) if wanted.preset else {}
    except presets.PresetRefused as refused:
        refuse_value(turn, "policy", "", "preset", str(refused))
        return
    asked = preset | dict(wanted.values)
    for name, reason in Policy.of(values | asked).conflicts()[:1]:
        refuse_value(turn, "policy", "", name, reason)
        return
    changed = sorted((n, values[n], new) for n, new in asked.items())
    changes = tuple(change for change in changed if change[1] != change[2])
    if changes:
        turn.emit(ev.PolicyChanged(changes))


def live_pair_requested(turn: Turn, wanted: ev.LivePairRequested) -> None:
    new = named(turn, "live", wanted.new)
    old = named(turn, "live", wanted.old)
    if new is None or old is None:
        return
    pair = turn.state.pairs.get(new.pair_id)
    if pair is not None and (pair.new, pair.old) == (new.id, old.id):
        return
    if reason := _cannot_go_live(new):
        refuse(turn, "live", new.id, reason)
    elif old.state is not S.PREFILL or not pairs.may_be_old(old):
        reason = f"it is {old.state}; a Prefill can finish for another"
        if old.state is S.PREFILL:
            reason = "it restarts, or stands in for one that does"
        turn.emit(ev.CommandRefused("live", old.id, reason, field="old"))
    elif (found := loads.from_peers(turn, new)) is None:
        reason = "nobody has weights to give over a link that is free and on (ladder_*)"
        refuse(turn, "live", new.id, reason)
    else:
        rung, upstream = found
        left = "" if new.stands_in else new.role
        pairs.open_pair(turn, new, old, upstream, rung)
        scaling.follow(turn, left, "prefill")


def _cannot_go_live(replica: Replica) -> str:
    if replica.state is not S.INACTIVE or replica.worker != "attached":
        return f"it is {replica.state} with worker {replica.worker}; an inactive one can go live"
    if replica.cordoned:
        return "it is drained; undrain it first"
    if replica.role not in ("spare", "prefill"):
        return f"it is to be {replica.role}; a spare or a prefill replica can go live"
    return ""


# What follows by itself.


def expire(turn: Turn) -> None:
    """Empties replicas whose drain has taken too long. What is on them goes on elsewhere if
    there is, or will be, somewhere else."""
    for replica in turn.state.in_states(*SHUTTING, S.AUS_PREFILL, S.MUTATING_TO_DECODE):
        if not replica.drain_deadline_ns or turn.mono_ns < replica.drain_deadline_ns:
            continue
        # One that restarts comes back itself.
        if replica.restart_epoch or _others_serve(turn, replica):
            leave(turn, replica, "drain_deadline", "its drain took too long")
            continue
        reason = f"replica {replica.id} was drained and its deadline has passed"
        for request in turn.state.requests_on(replica.id):
            fail(turn, request, "drain_deadline", reason)


def _others_serve(turn: Turn, replica: Replica) -> bool:
    """Whether replicas but this one prefill and decode, or are about to."""
    others = [r for r in turn.state.replicas.values() if r is not replica and not r.cordoned]
    roles = {r.role for r in others}
    return "colocated" in roles or {"prefill", "decode"} <= roles


def settle(turn: Turn) -> None:
    """Completes every change that has nothing left to wait for."""
    restarts.advance(turn)
    for replica in turn.state.in_states(*_FOLLOWS):
        follows = _FOLLOWS.get(replica.state)
        if follows is not None:
            follows(turn, replica)
    _retire(turn)
    # Again, since a restart may go on with what has just been emptied.
    restarts.advance(turn)


def _empty(turn: Turn, replica: Replica) -> None:
    if not turn.state.requests_on(replica.id):
        turn.emit(ev.ReplicaEmptied(replica.id, replica.epoch))


def _open_prefill(turn: Turn, replica: Replica) -> None:
    if not turn.state.requests_on(replica.id):
        turn.emit(ev.PrefillOpened(replica.id, replica.epoch))


def _open_alone(turn: Turn, replica: Replica) -> None:
    """A new one whose old is gone has nobody to drain with, and all layers for what it has."""
    if not replica.pair_id:
        turn.emit(ev.PrefillOpened(replica.id, replica.epoch))


def _finish_mutation(turn: Turn, replica: Replica) -> None:
    for request in turn.state.requests_on(replica.id):
        if request.rest and not request.lease_id and request.state is RequestState.MIGRATING:
            _with_half_of_its_kv(turn, replica, request)
    held = turn.state.requests_on(replica.id)
    if any(r.state is not RequestState.MIGRATING or r.lease_id or r.rest for r in held):
        return
    flushed = tuple(request.id for request in held)
    turn.emit(ev.MutationFinished(replica.id, replica.epoch, flushed))
    for request_id in flushed:
        attempt = turn.state.requests[request_id].resumes
        turn.command(DecodeLocally(replica.id, replica.epoch, request_id, attempt))


def _with_half_of_its_kv(turn: Turn, replica: Replica, request: Request) -> None:
    """It has to be handed over before the role changes. If that role is what it waits for, it
    would wait for itself."""
    if not turn.state.index.acceptors:
        reason = "the rest of its KV is elsewhere, and there is no replica to take both"
        on = (replica.id, replica.epoch)
        resume(turn, request, "handover_failed", on, reason, living=True)


def _retire(turn: Turn) -> None:
    """Those that were warm for nothing, the oldest first."""
    nulls = list(turn.state.index.nulls)
    feeding = turn.state.feeding() if nulls else ()
    for replica_id in nulls:
        oldest = turn.state.replicas[replica_id]
        if turn.mono_ns < oldest.null_ns + turn.policy.null_ttl_ms * MS:
            return
        if replica_id not in feeding:
            moves.deactivate(turn, oldest, "ttl")


_FOLLOWS = {
    S.SHUTTING_PREFILL: _empty,
    S.SHUTTING_DECODE: _empty,
    S.AUS_PREFILL: _open_prefill,
    S.REFACTORY_PREFILL: _open_alone,
    S.MUTATING_TO_DECODE: _finish_mutation,
}
