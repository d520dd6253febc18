"""The integer programme in a worker: New's targets, solved beside the step loop.

A plan is made as in the pair model, when the first layer is there and at every arrival from then
to the end of the load; but from what New has measured: layers are expected at the rate at which
they have come, Old when what it took should be over. While none is in force, or none holds in
the model, the queues go on without.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from blitzd.sched.pair_model import Arrival, Pair
from blitzd.sched.zigzag import NO_TARGETS
from blitzd.sched.zigzag_targets import plan_targets

if TYPE_CHECKING:
    from blitzd.engine.step_loop import StepLoop

log = structlog.get_logger()


@dataclass(slots=True)
class Observed:
    """What New knows of the pair's times; ns of `time.monotonic_ns`."""

    layers: int
    came_ns: list[int] = field(default_factory=list)
    """Of the embedding, and of each layer that is there."""
    old_free_ns: int = 0
    """When Old should be done with what it took."""
    _tokens: int = 0
    _layer_ns: int = 0

    def came(self, ready: int, now_ns: int) -> bool:
        """Whether layers are there for the first time."""
        before = len(self.came_ns)
        self.came_ns += [now_ns] * (ready + 1 - before)
        return before <= 1 < len(self.came_ns)

    def ran(self, tokens: int, layer_ns: int) -> None:
        self._tokens, self._layer_ns = tokens, layer_ns

    def layer_ns(self, tokens: int) -> int:
        """A layer's time is about linear in its tokens. 0 before any has run."""
        return self._layer_ns * tokens // self._tokens if self._tokens else 0

    def given(self, left_ns: int, now_ns: int) -> None:
        """Old has a request for so long."""
        self.old_free_ns = max(now_ns, self.old_free_ns) + left_ns

    def pair(self, waiting: Sequence[tuple[int, int, int]], now_ns: int) -> Pair | None:
        """What is to be planned, from now; None when there is nothing to plan, or no rate to
        expect layers at. `waiting` is (order, ns of a layer, layers done)."""
        there = len(self.came_ns) - 1
        if not waiting or not 1 <= there < self.layers:
            return None
        if any(layer_ns < 1 for _, layer_ns, _ in waiting):
            return None
        last = self.came_ns[-1]
        each = (last - self.came_ns[0]) // there
        coming = (last + each * k - now_ns for k in range(1, self.layers - there + 1))
        return Pair(
            # One that is late is still not there.
            ready_ns=(*(0,) * there, *(max(1, at) for at in coming)),
            arrivals=tuple(Arrival(0, layer_ns, done) for _, layer_ns, done in waiting),
            old_free_ns=max(0, self.old_free_ns - now_ns),
        )


class LivePlanner:
    """Lives, and is called, in the event loop; solves on a thread, one plan at a time."""

    def __init__(self, steps: StepLoop) -> None:
        self._steps = steps
        self._wanted = asyncio.Event()
        self._planning = asyncio.create_task(self._run())

    def replan(self) -> None:
        self._wanted.set()

    async def close(self) -> None:
        self._planning.cancel()
        await asyncio.wait([self._planning])

    async def _run(self) -> None:
        try:
            # The solver takes long to import: not when a plan is waited for.
            await asyncio.to_thread(importlib.import_module, "highspy")
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                await self._plan()
        except Exception:
            log.exception("no plans any more: the queues go on without")
            self._set(NO_TARGETS)

    async def _plan(self) -> None:
        with self._steps.exclusive() as stepper:
            waiting = stepper.live.backlog
            pair = stepper.live.observed.pair(waiting, time.monotonic_ns())
        split = None if pair is None else await asyncio.to_thread(plan_targets, pair)
        orders = [order for order, _, _ in waiting]
        self._set(NO_TARGETS if split is None else dict(zip(orders, split, strict=True)))

    def _set(self, targets: Mapping[int, int]) -> None:
        with self._steps.exclusive() as stepper:
            stepper.live.set_targets(targets)
