"""Which layer of which request runs next on the two replicas of a live pair.

New has some of its layers and executes them one at a time; Old has all of them and runs
whatever it takes to the end. These are the rules of BlitzScale's queue policy without an ILP,
one decision a function, so that the engine and the simulator decide alike:

* New runs the earliest request whose next layer has arrived (a zigzag over the requests);
* an idle Old takes the earliest request, with the layers that it has behind it; if New is
  executing it, Old gets it at the end of that layer;
* once all layers are there, New keeps the head to itself and Old takes from behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar


class Policy(StrEnum):
    ILP_FREE = "ilp_free"
    """BlitzScale's queues: `next_on_new`, `next_for_old`."""
    ILP = "ilp"
    """The same with targets from the integer programme, where a validated plan has any."""
    BEST_EFFORT = "best_effort"
    """New runs the layers that it has once, in order of arrival, and lets the request go."""
    STOP_THE_WORLD = "stop_the_world"
    """New runs nothing before its last layer is there."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that New has begun or may begin. `done` of its layers are executed."""

    order: int
    """Place in order of arrival; the least comes first."""
    done: int = 0


W = TypeVar("W", bound=Waiting)

NO_TARGETS: Mapping[int, int] = {}

CAP = 4
CAP_LEAST = 2
CAP_STEP_NS = 200_000_000


def pending_cap(elapsed_ns: int) -> int:
    """Requests that may be pending on New, `elapsed_ns` after it went live.

    max(2, 4 - floor(elapsed / 200 ms)), as BlitzScale has it: at first only New's few layers
    can be executed ahead; later a request is at New only a short time.
    """
    return max(CAP_LEAST, CAP - elapsed_ns // CAP_STEP_NS)


def next_on_new(
    waiting: Sequence[W],
    ready: int,
    layers: int,
    targets: Mapping[int, int] = NO_TARGETS,
) -> W | None:
    """The request whose next layer New executes; None when no next layer has arrived.

    `waiting` is in order of arrival and has nothing that Old runs; layers [0, `ready`) have
    arrived. `targets` are the layers, by order, that a plan wants of New: requests short of
    theirs go first.
    """
    runnable = [one for one in waiting if one.done < min(ready, layers)]
    short = (one for one in runnable if one.done < targets.get(one.order, 0))
    return next(short, runnable[0] if runnable else None)


def next_for_old(
    waiting: Sequence[W],
    executing: W | None,
    ready: int,
    layers: int,
    targets: Mapping[int, int] = NO_TARGETS,
) -> W | None:
    """The request that an idle Old takes now; None when it waits.

    `executing` is the one that New is in the middle of a layer of. A plan's target is waited
    for only while New can get there with the layers that have arrived, so a plan that went
    wrong costs Old no more than those.
    """
    if ready >= layers:
        head = executing if executing is not None else (waiting[0] if waiting else None)
        return next((one for one in waiting if one is not head), None)
    if not waiting or waiting[0] is executing:
        return None
    first = waiting[0]
    target = targets.get(first.order, 0)
    return None if first.done < target <= ready else first


def best_effort_on_new(waiting: Sequence[W], last: W | None, ready: int, layers: int) -> W | None:
    """What New executes without a zigzag: a request's layers that are there, once.

    `last` is the request that New was at last, and may go on with.
    """
    if ready >= layers:
        return next_on_new(waiting, ready, layers)
    runnable = (one for one in waiting if one.done < ready)
    return next((one for one in runnable if not one.done or one is last), None)


def best_effort_for_old(waiting: Sequence[W], executing: W | None) -> W | None:
    """What New has begun and let go of, which has less left to run; else the earliest."""
    free = [one for one in waiting if one is not executing]
    return next((one for one in free if one.done), free[0] if free else None)
