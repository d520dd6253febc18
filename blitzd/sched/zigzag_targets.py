"""The integer programme in use: a plan counts only after it ran in the pair model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blitzd.sched.pair_model import Arrival, Pair, Planner, simulate
from blitzd.sched.zigzag import NO_TARGETS
from blitzd.sched.zigzag_plan import REQUESTS_MAX, Programme, solve


def validated(pair: Pair, split: Sequence[int]) -> bool:
    """Whether T = `split` holds against the real times of arrival of layers: Old never waits,
    takes nothing short of its target, and the mean time of completion is no worse than
    without a plan."""
    planned = simulate(pair, targets=dict(enumerate(split)))
    free = simulate(pair)
    return (
        planned.stall_ns == 0
        and planned.early == 0
        and sum(planned.finish_ns) <= sum(free.finish_ns)
    )


def plan_targets(pair: Pair) -> list[int] | None:
    """Layers for New of each request of `pair`, all of which are there at time 0; None when
    the queue policy is to go on without a plan."""
    ready = sum(at <= 0 for at in pair.ready_ns)
    if not 1 <= ready < pair.layers or not 1 <= len(pair.arrivals) <= REQUESTS_MAX:
        return None
    programme = Programme(
        layers=pair.layers,
        ready=ready,
        layer_load=pair.loaded_ns / (pair.layers - ready),
        costs=[one.layer_ns for one in pair.arrivals],
        done=[one.done for one in pair.arrivals],
        old_busy=pair.old_free_ns,
    )
    split = solve(programme)
    return split if split is not None and validated(pair, split) else None


def planner_for(pair: Pair) -> Planner:
    """Plans for what waits whenever the model asks, knowing when layers will arrive but not
    which requests will."""

    def targets(
        now: int, old_free_ns: int, waiting: Sequence[tuple[int, int, int]]
    ) -> Mapping[int, int]:
        rest = Pair(
            ready_ns=tuple(max(0, at - now) for at in pair.ready_ns),
            arrivals=tuple(Arrival(0, layer_ns, done) for _, layer_ns, done in waiting),
            old_free_ns=old_free_ns - now,
        )
        split = plan_targets(rest)
        if split is None:
            return NO_TARGETS
        return {order: here for (order, _, _), here in zip(waiting, split, strict=True)}

    return targets
