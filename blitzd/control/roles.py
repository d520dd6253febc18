"""Decisions about roles: operators' commands, scaling to wanted counts, and what follows
when a replica that drains, mutates or pairs has nothing left to wait for."""

from blitzd.control.commands import DecodeLocally, LoadModel, ResetWorker
from blitzd.control.requests import fail
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica, ReplicaState, RequestState

MS = 1_000_000
S = ReplicaState
ROLES = ("prefill", "decode", "colocated", "spare")
SHUTTING = (S.SHUTTING_PREFILL, S.SHUTTING_DECODE)
SERVING_AS = {"prefill": S.PREFILL, "decode": S.DECODE, "colocated": S.COLOCATED}


# Operators' commands. Each is idempotent; one that does not fit is refused by name.


def drain_requested(turn: Turn, wanted: ev.DrainRequested) -> None:
    replica = _named(turn, "drain", wanted.replica)
    if replica is None or replica.state in (*SHUTTING, S.SHUTTING_NULL):
        return
    if replica.state in SERVING_AS.values():
        _shut(turn, replica, "drain", wanted.deadline_ns)
    else:
        _refuse(turn, "drain", replica.id, f"it is {replica.state} and serves nothing")


def undrain_requested(turn: Turn, wanted: ev.UndrainRequested) -> None:
    replica = _named(turn, "undrain", wanted.replica)
    if replica is None:
        return
    back = replica.null_role or replica.configured
    if replica.state in SHUTTING:
        _revive(turn, replica)
    elif replica.state is S.SHUTTING_NULL:
        _reuse(turn, replica, back)
    elif replica.cordoned:
        turn.emit(ev.RoleAssigned(replica.id, back))


def role_requested(turn: Turn, wanted: ev.RoleRequested) -> None:
    replica = _named(turn, "role", wanted.replica)
    if replica is None or replica.role == wanted.role:
        return
    if wanted.role not in ROLES:
        reason = f"role {wanted.role!r}: one of {', '.join(ROLES)} is accepted"
        _refuse(turn, "role", replica.id, reason)
        return
    match replica.state, wanted.role:
        case ((S.INACTIVE | S.FAILED), _):
            turn.emit(ev.RoleAssigned(replica.id, wanted.role))
        case S.SHUTTING_NULL, _:
            _reuse(turn, replica, wanted.role)
        case ((S.SHUTTING_PREFILL | S.SHUTTING_DECODE), role) if role == replica.null_role:
            _revive(turn, replica)
        case (S.PREFILL, "decode") | (S.DECODE, "prefill"):
            turn.emit(ev.MutationStarted(replica.id, replica.epoch, wanted.role))
        case ((S.PREFILL | S.DECODE | S.COLOCATED), "spare"):
            _shut(turn, replica, "role", 0)
        case _:
            reason = f"it is {replica.state}, which does not turn into {wanted.role} now"
            _refuse(turn, "role", replica.id, reason)


def deactivate_requested(turn: Turn, wanted: ev.DeactivateRequested) -> None:
    replica = _named(turn, "deactivate", wanted.replica)
    if replica is None or replica.state is S.INACTIVE:
        return
    if replica.state is S.SHUTTING_NULL:
        _deactivate(turn, replica, "plan")
    else:
        reason = f"it is {replica.state}; only an empty one gives up its weights: drain it first"
        _refuse(turn, "deactivate", replica.id, reason)


def live_pair_requested(turn: Turn, wanted: ev.LivePairRequested) -> None:
    new = _named(turn, "live", wanted.new)
    old = _named(turn, "live", wanted.old)
    if new is None or old is None:
        return
    if new.state is not S.INACTIVE or new.worker != "attached":
        reason = f"it is {new.state} with worker {new.worker}; an inactive one can go live"
        _refuse(turn, "live", new.id, reason)
    elif old.state is not S.PREFILL:
        _refuse(turn, "live", old.id, f"it is {old.state}; a Prefill can finish for another")
    else:
        pair_id, cap = turn.state.node.next_pair, turn.policy.pair_cap
        sides = (new.id, new.epoch, old.id, old.epoch)
        turn.emit(ev.PairOpened(pair_id, *sides, cap, "host"))
        turn.command(LoadModel(new.id, new.epoch))


def pair_drained(turn: Turn, drained: ev.PairDrained) -> None:
    replica = turn.current(drained.replica, drained.epoch)
    if replica is None:
        return
    if replica.pair_id == drained.pair_id and replica.state is S.REFACTORY_PREFILL:
        turn.emit(ev.PairSettled(drained.pair_id))
    else:
        turn.ignore(drained.replica, drained.epoch)


def scale_requested(turn: Turn, wanted: ev.ScaleRequested) -> None:
    total = len(turn.state.replicas)
    counts = (wanted.prefill, wanted.decode)
    if min(counts) < 1 or sum(counts) > total:
        reason = (
            f"prefill={wanted.prefill}, decode={wanted.decode}: at least 1 of each and no more"
            f" than the {total} replicas together are accepted"
        )
        _refuse(turn, "scale", "", reason)
    elif counts != (turn.state.node.wanted_prefill, turn.state.node.wanted_decode):
        turn.emit(ev.ScaleSet(*counts))


def _named(turn: Turn, command: str, replica_id: str) -> Replica | None:
    replica = turn.state.replicas.get(replica_id)
    if replica is None:
        known = ", ".join(sorted(turn.state.replicas))
        _refuse(turn, command, replica_id, f"no such replica; there are {known}")
    return replica


def _refuse(turn: Turn, command: str, replica_id: str, reason: str) -> None:
    turn.emit(ev.CommandRefused(command, replica_id, reason))


# Moves.


def _shut(turn: Turn, replica: Replica, reason: str, deadline_ns: int) -> None:
    turn.emit(ev.ShutdownStarted(replica.id, replica.epoch, reason, deadline_ns))


def _revive(turn: Turn, replica: Replica) -> None:
    turn.emit(ev.ReplicaRevived(replica.id, replica.epoch, replica.null_role))
    _open_decode(turn, replica)


def _reuse(turn: Turn, replica: Replica, role: str) -> None:
    turn.emit(ev.NullReused(replica.id, replica.epoch, role))
    _open_decode(turn, replica)


def _open_decode(turn: Turn, replica: Replica) -> None:
    if replica.state is S.AUS_DECODE:
        turn.emit(ev.DecodeOpened(replica.id, replica.epoch))


def _deactivate(turn: Turn, replica: Replica, reason: str) -> None:
    turn.emit(ev.ReplicaDeactivated(replica.id, replica.epoch, reason))
    turn.command(ResetWorker(replica.id, replica.epoch, unload=True))


# What follows by itself.


def settle(turn: Turn) -> None:
    """Completes every change that has nothing left to wait for."""
    for replica in turn.state.in_states(*_FOLLOWS):
        if replica.drain_deadline_ns and turn.mono_ns >= replica.drain_deadline_ns:
            for request in turn.state.requests_on(replica.id):
                reason = f"replica {replica.id} was drained and its deadline has passed"
                fail(turn, request, "drain_deadline", reason)
        follows = _FOLLOWS.get(replica.state)
        if follows is not None:
            follows(turn, replica)
    _retire(turn)


def _empty(turn: Turn, replica: Replica) -> None:
    if not turn.state.requests_on(replica.id):
        turn.emit(ev.ReplicaEmptied(replica.id, replica.epoch))


def _open_prefill(turn: Turn, replica: Replica) -> None:
    if not turn.state.requests_on(replica.id):
        turn.emit(ev.PrefillOpened(replica.id, replica.epoch))


def _open_alone(turn: Turn, replica: Replica) -> None:
    """A new one whose old is gone has nobody to drain with."""
    if not replica.pair_id:
        _open_prefill(turn, replica)


def _finish_mutation(turn: Turn, replica: Replica) -> None:
    held = turn.state.requests_on(replica.id)
    if any(r.state is not RequestState.MIGRATING or r.lease_id for r in held):
        return
    flushed = tuple(request.id for request in held)
    turn.emit(ev.MutationFinished(replica.id, replica.epoch, flushed))
    for request_id in flushed:
        turn.command(DecodeLocally(replica.id, replica.epoch, request_id))


def _retire(turn: Turn) -> None:
    """Those that were warm for nothing, the oldest first."""
    while nulls := turn.state.index.nulls:
        oldest = turn.state.replicas[next(iter(nulls))]
        if turn.mono_ns < oldest.null_ns + turn.policy.null_ttl_ms * MS:
            return
        _deactivate(turn, oldest, "ttl")


_FOLLOWS = {
    S.SHUTTING_PREFILL: _empty,
    S.SHUTTING_DECODE: _empty,
    S.AUS_PREFILL: _open_prefill,
    S.REFACTORY_PREFILL: _open_alone,
    S.MUTATING_TO_DECODE: _finish_mutation,
}


# Scaling to the counts that an operator wants.


def scale(turn: Turn) -> None:
    """Moves towards the wanted counts: mutate, then up, then down, one ladder for both roles.
    Does nothing while no counts are wanted."""
    node = turn.state.node
    if not node.wanted_prefill or node.phase != "running":
        return
    there = turn.state.index.roles
    missing = {
        "prefill": node.wanted_prefill - there["prefill"],
        "decode": node.wanted_decode - there["decode"],
    }
    while missing["prefill"] < 0 < missing["decode"] and _mutate_one(turn):
        missing["prefill"] += 1
        missing["decode"] -= 1
    for role in ("decode", "prefill"):
        while missing[role] > 0 and _raise_one(turn, role):
            missing[role] -= 1
        while missing[role] < 0 and _lower_one(turn, role):
            missing[role] += 1


def _idlest(turn: Turn, replicas: list[Replica]) -> Replica | None:
    """An idle one if there is one, else the one with the fewest blocks reserved."""
    return min(replicas, key=lambda r: (turn.state.blocks_reserved(r.id), r.id), default=None)


def _mutate_one(turn: Turn) -> bool:
    chosen = _idlest(turn, turn.state.in_states(S.PREFILL))
    if chosen is None:
        return False
    turn.emit(ev.MutationStarted(chosen.id, chosen.epoch, "decode"))
    return True


def _spare(turn: Turn, *states: ReplicaState) -> list[Replica]:
    return [r for r in turn.state.in_states(*states, role="spare") if not r.cordoned]


def _raise_one(turn: Turn, role: str) -> bool:
    shutting = [r for r in _spare(turn, *SHUTTING) if r.null_role == role]
    nulls = _spare(turn, S.SHUTTING_NULL)
    inactive = _spare(turn, S.INACTIVE)
    if shutting:
        revived = _idlest(turn, shutting)
        assert revived is not None
        _revive(turn, revived)
    elif nulls:
        # One that had the role before needs no change of its guard.
        _reuse(turn, min(nulls, key=lambda r: (r.null_role != role, r.null_ns, r.id)), role)
    elif inactive:
        turn.emit(ev.RoleAssigned(inactive[0].id, role))
    else:
        return False
    return True


def _lower_one(turn: Turn, role: str) -> bool:
    """What serves nothing yet goes first, then what is idle, then what has least to finish;
    never the last that serves, while others of its role still load."""
    for replica in turn.state.in_states(S.INACTIVE, S.FAILED, role=role):
        turn.emit(ev.RoleAssigned(replica.id, "spare"))
        return True
    serving = turn.state.in_states(SERVING_AS[role])
    chosen = _idlest(turn, serving)
    if chosen is None or len(serving) < 2:
        return False
    if role == "decode" and not turn.state.requests_on(chosen.id):
        turn.emit(ev.ReplicaExpired(chosen.id, chosen.epoch, "scale"))
    else:
        _shut(turn, chosen, "scale", 0)
    return True
