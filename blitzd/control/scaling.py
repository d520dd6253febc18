"""Scaling to the counts that an operator wants, and the choice of who comes and who goes."""

from blitzd.control import ladder, moves
from blitzd.control.ladder import idlest_first
from blitzd.control.moves import SERVING_AS, STOPPABLE_LOADS, named, refuse
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica, ReplicaState

S = ReplicaState


def scale_requested(turn: Turn, wanted: ev.ScaleRequested) -> None:
    total = len(turn.state.replicas)
    counts = (wanted.prefill, wanted.decode)
    if min(counts) < 1 or sum(counts) > total:
        reason = (
            f"prefill={wanted.prefill}, decode={wanted.decode}: at least 1 of each and no more"
            f" than the {total} replicas together are accepted"
        )
        field = "prefill" if wanted.prefill < 1 else "decode"
        moves.refuse_value(turn, "scale", "", field, reason)
    elif counts != (turn.state.node.wanted_prefill, turn.state.node.wanted_decode):
        turn.emit(ev.ScaleSet(*counts))


def remove_requested(turn: Turn, wanted: ev.RemoveRequested) -> None:
    """One less of its role, and this one is it."""
    replica = named(turn, "remove", wanted.replica)
    if replica is None or replica.role == "spare":
        return
    node = turn.state.node
    counts = {
        "prefill": node.wanted_prefill or _count(turn, "prefill"),
        "decode": node.wanted_decode or _count(turn, "decode"),
    }
    if replica.role not in counts or replica.stands_in or replica.state not in _REMOVABLE:
        refuse(turn, "remove", replica.id, f"it is {replica.state} and cannot be removed now")
        return
    counts[replica.role] -= 1
    serving = _of_role(turn, replica.role, SERVING_AS[replica.role])
    if not any(other is not replica for other in serving):
        reason = f"no other {replica.role} replica serves"
        refuse(turn, "remove", replica.id, reason)
    else:
        turn.emit(ev.ScaleSet(counts["prefill"], counts["decode"]))
        moves.lower(turn, replica, "scale")


def follow(turn: Turn, left: str, taken: str) -> None:
    """Has the wanted counts follow a replica whose role an operator changed, or the next pass
    would undo that."""
    node = turn.state.node
    if not node.wanted_prefill:
        return
    counts = {"prefill": node.wanted_prefill, "decode": node.wanted_decode}
    for role, change in ((left, -1), (taken, 1)):
        if role in counts:
            counts[role] = max(1, counts[role] + change)
    if (counts["prefill"], counts["decode"]) != (node.wanted_prefill, node.wanted_decode):
        turn.emit(ev.ScaleSet(counts["prefill"], counts["decode"]))


_REMOVABLE = (S.INACTIVE, S.FAILED, *STOPPABLE_LOADS, S.PREFILL, S.DECODE)


def scale(turn: Turn) -> None:
    """Moves towards the wanted counts: mutate, then up, then down, one ladder for both roles.
    Does nothing while no counts are wanted."""
    node = turn.state.node
    if not node.wanted_prefill or node.phase != "running":
        return
    missing = {
        "prefill": node.wanted_prefill - _count(turn, "prefill"),
        "decode": node.wanted_decode - _count(turn, "decode"),
    }
    both = min(-missing["prefill"], missing["decode"]) if turn.policy.ladder_mutate else 0
    if both > 0:
        mutated = _mutate(turn, both)
        missing["prefill"] += mutated
        missing["decode"] -= mutated
    if turn.policy.ladder_live_decode and missing["decode"] > 0:
        raised, mutated = _decode_at_once(turn, missing["decode"])
        missing["prefill"] += mutated
        missing["decode"] -= raised + mutated
    for role in ("decode", "prefill"):
        if missing[role] > 0:
            ladder.climb(turn, role, missing[role])
        elif missing[role] < 0:
            _lower(turn, role, -missing[role])


def _count(turn: Turn, role: str) -> int:
    """Those that have the role or are on the way to it, without those that only stand in."""
    stand_ins = sum(
        bool(r.stands_in) and r.role == role
        for r in map(turn.state.replicas.__getitem__, turn.state.index.restarting)
    )
    return turn.state.index.roles[role] - stand_ins


def _of_role(turn: Turn, role: str, *states: ReplicaState) -> list[Replica]:
    return [r for r in turn.state.in_states(*states, role=role) if not r.stands_in]


# Each ranks once and takes from the front: thousands may come or go in one turn, and taking
# one changes nothing about the order of the others.


def _mutate(turn: Turn, count: int) -> int:
    chosen = idlest_first(turn, _of_role(turn, "prefill", S.PREFILL))[:count]
    for replica in chosen:
        turn.emit(ev.MutationStarted(replica.id, replica.epoch, "decode"))
    return len(chosen)


def _decode_at_once(turn: Turn, count: int) -> tuple[int, int]:
    """(raised, mutated): of what revive and reuse leave, as many prefill replicas turn into
    decode ones as can be loaded in their place, but not the last that serves. Weights that come
    into a decode replica would meet its KV; into a prefill replica nothing else comes."""
    raised = len(ladder.climb(turn, "decode", count, to_load=False))
    prefills = len(_of_role(turn, "prefill", S.PREFILL))
    free = ladder.can_load(turn)
    return raised, _mutate(turn, max(0, min(count - raised, prefills - 1, free)))


def _lower(turn: Turn, role: str, count: int) -> None:
    """What serves nothing yet goes first, the farthest from it before others, then what is
    idle, then what has least to finish; never the last that serves."""
    pending = _of_role(turn, role, S.INACTIVE, S.FAILED, *STOPPABLE_LOADS)
    pending.sort(key=lambda r: (r.state in STOPPABLE_LOADS, r.layers_ready, r.id))
    serving = idlest_first(turn, _of_role(turn, role, SERVING_AS[role]))
    for replica in (*pending, *serving[:-1])[:count]:
        moves.lower(turn, replica, "scale")
