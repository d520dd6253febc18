"""The ladder: how one more replica of a role is had.

One ordered list of rungs for all roles, cheapest first; a replica is raised by the first that
applies. Which are on is policy (`ladder_*`). The event that decides names its rung and why
those before it did not apply.

1. *revive* one that still shuts from the role,
2. *reuse* one that is empty and still has the weights (those that had the role first: their
   KV guard stays as it is, then those that were empty longest),
3. *load* one without weights. Where these come from are the rungs that follow, in `loads`,
   decided when the worker is there: *map*, *nvlink*, *shard*, *chain*, *p2p*, *host*, *pool*,
   *disk*.

The order is the original's (reference 4.1), with the mapped file before the network: nothing
moves then.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from blitzd.control import moves
from blitzd.control.moves import SHUTTING, Step
from blitzd.control.policy import Policy
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica, ReplicaState

S = ReplicaState


def is_off(policy: Policy, rung: str) -> str:
    """Why it is not on; empty: it is."""
    name = f"ladder_{rung}"
    return "" if getattr(policy, name, 1) else f"off: {name} is 0"


def climb(
    turn: Turn, role: str, count: int, at_once: bool = False, to_load: bool = True
) -> list[Replica]:
    """Raises so many spares to `role`, or as many as there are. `at_once`: only those that can
    begin now, since their worker is there and does not restart. `to_load`: those too that have
    to load."""
    raised: list[Replica] = []
    skipped: tuple[tuple[str, str], ...] = ()
    for rung in RUNGS if to_load else RUNGS[:-1]:
        if len(raised) == count:
            break
        why = is_off(turn.policy, rung.name)
        if not why:
            found = rung.find(turn, role, at_once)[: count - len(raised)]
            for replica in found:
                rung.take(turn, replica, role, Step(rung.name, skipped))
            raised += found
            why = rung.none.format(role=role)
            if found:
                why = f"taken for {len(found)} of {count}"
        skipped += ((rung.name, why),)
    return raised


def idlest_first(turn: Turn, replicas: list[Replica]) -> list[Replica]:
    """Those that are idle, then those with the fewest blocks reserved."""
    return sorted(replicas, key=lambda r: (turn.state.blocks_reserved(r.id), r.id))


def _spares(turn: Turn, at_once: bool, *states: ReplicaState) -> list[Replica]:
    return [
        replica
        for replica in turn.state.in_states(*states, role="spare")
        if not replica.cordoned
        and not (at_once and (replica.restart_epoch or replica.worker != "attached"))
    ]


# Each finds and ranks once: thousands may come in one turn, and taking one changes nothing
# about the order of the others.


def _shutting(turn: Turn, role: str, at_once: bool) -> list[Replica]:
    shutting = [r for r in _spares(turn, at_once, *SHUTTING) if r.null_role == role]
    return idlest_first(turn, shutting)


def _nulls(turn: Turn, role: str, at_once: bool) -> list[Replica]:
    nulls = _spares(turn, at_once, S.SHUTTING_NULL)
    if not turn.policy.ladder_reuse_any:
        nulls = [r for r in nulls if r.null_role == role]
    return sorted(nulls, key=lambda r: (r.null_role != role, r.null_ns, r.id))


def _inactive(turn: Turn, _: str, at_once: bool) -> list[Replica]:
    """Who keeps the model for others first: it has the weights at hand."""
    return sorted(_spares(turn, at_once, S.INACTIVE), key=lambda r: not r.pooled)


def can_load(turn: Turn) -> int:
    """How many spares could load now."""
    return len(_spares(turn, True, S.INACTIVE))


def _revive(turn: Turn, replica: Replica, _: str, step: Step) -> None:
    moves.revive(turn, replica, step)


def _load(turn: Turn, replica: Replica, role: str, step: Step) -> None:
    turn.emit(ev.RoleAssigned(replica.id, role, *step))


class Rung(NamedTuple):
    name: str
    find: Callable[[Turn, str, bool], list[Replica]]
    """The spares it applies to, best first."""
    take: Callable[[Turn, Replica, str, Step], None]
    none: str
    """Said when it finds nobody."""


RUNGS: Sequence[Rung] = (
    Rung("revive", _shutting, _revive, "no spare still shuts from {role}"),
    Rung("reuse", _nulls, moves.reuse, "no spare that may be {role} still has the weights"),
    Rung("load", _inactive, _load, "no spare is without weights"),
)
