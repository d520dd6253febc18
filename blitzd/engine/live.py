"""Prefills that run a layer at a time, here and, from some layer on, at the paired replica.

On New the requests wait in order of arrival, and `blitzd.sched.zigzag` says which runs its
next layer. Old asks; it gets one request with its hidden states, which New keeps until Old has
said that it has its own. On Old such a request runs its remaining layers in one step. Each
side's KV of its layers stays held for export.

All methods but `compute` are called under the step loop's lock.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from blitzd.engine.errors import NotHeld
from blitzd.engine.executor import Executor
from blitzd.engine.generation import Generation
from blitzd.engine.hidden_slots import HiddenSlots
from blitzd.engine.live_plan import Observed
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import Chunk, NoRoom, Refused, Reservation, Scheduler, StepPlan
from blitzd.sched.zigzag import (
    Policy,
    Waiting,
    best_effort_for_old,
    best_effort_on_new,
    next_for_old,
    next_on_new,
)

PENDING = 16
"""Requests on New at once. The daemon's cap is lower; this one only bounds a mistake."""


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRequest(Waiting):
    request: pb.Request
    generation: Generation
    reservation: Reservation
    plan: StepPlan
    first: int = 0
    """The layer that this replica began with."""
    from_new: bool = False
    """This replica is Old, and has taken it over."""
    hidden: torch.Tensor | None = None
    slot: int | None = None
    gone: bool = False
    """Cancelled in the middle of a step."""

    @property
    def id(self) -> int:
        return self.generation.sequence.id


@dataclass(frozen=True, slots=True)
class LiveStep:
    one: LiveRequest
    last: int
    """Runs layers [one.done, last)."""
    taken: bool = False
    """From New, to its end here."""


@dataclass(slots=True)
class LiveQueue:
    executor: Executor
    scheduler: Scheduler
    layers: int
    slots: HiddenSlots
    policy: Policy = Policy.ILP_FREE
    """ILP_FREE; with ILP somebody plans when `replan` is called, and sets `targets`."""
    ready: int = 0
    """Layers that can run here, the whole model's end included at `layers`."""
    changed: Callable[[], None] = lambda: None
    """Called when an answer to `ask` may be there."""
    ending: Callable[[], None] = lambda: None
    """Called, without the lock, as the last layer of a request from New begins."""
    replan: Callable[[], None] = lambda: None
    targets: Mapping[int, int] = field(default_factory=dict)
    """By order: layers that New should execute of a request."""
    observed: Observed = field(init=False)
    waiting: list[LiveRequest] = field(default_factory=list)
    arriving: dict[int, LiveRequest] = field(default_factory=dict)
    """From New, until their hidden states are here."""
    taken: deque[LiveRequest] = field(default_factory=deque)
    executing: LiveRequest | None = None
    last_here: LiveRequest | None = None
    """What was executed last, on New."""
    offered: LiveRequest | None = None
    """To Old, which has yet to say that it has it."""
    asked: bool = False
    _orders: int = 0
    _in_last_layer: bool = False

    def __post_init__(self) -> None:
        self.observed = Observed(self.layers)

    # -- on New -------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        return self.ready >= self.layers

    def set_ready(self, layers: int) -> None:
        self.ready = layers
        if self.observed.came(layers, time.monotonic_ns()):
            self.replan()
        self._offer()

    @property
    def backlog(self) -> list[tuple[int, int, int]]:
        """(order, ns of one of its layers, layers done) of what waits on New."""
        return [
            (one.order, self.observed.layer_ns(one.plan.tokens), one.done) for one in self.waiting
        ]

    def set_targets(self, targets: Mapping[int, int]) -> None:
        self.targets = targets
        self._offer()

    @property
    def empty(self) -> bool:
        return not (self.waiting or self.arriving or self.taken or self.executing or self.offered)

    @property
    def ids(self) -> list[int]:
        return [one.id for one in self._everyone()]

    def _everyone(self) -> list[LiveRequest]:
        found = [*self.waiting, *self.arriving.values(), *self.taken]
        found += [one for one in (self.executing, self.offered) if one is not None]
        return [one for one in dict.fromkeys(found) if not one.gone]

    def add(self, request: pb.Request, generation: Generation) -> None:
        """Queues it. Raises Refused, NoRoom."""
        if len(self.waiting) >= PENDING:
            raise NoRoom(f"{PENDING} requests are pending already")
        self._orders += 1
        insort(self.waiting, self._admit(request, generation, 0, self._orders), key=_order)
        self.replan()
        self._offer()

    def _admit(
        self, request: pb.Request, generation: Generation, done: int, order: int
    ) -> LiveRequest:
        sequence = generation.sequence
        if sequence.id in self.ids or sequence.id in self.arriving:
            raise Refused(f"request_id: {sequence.id} is here already")
        if not sequence.hold or sequence.uncached:
            raise Refused("hold: a live prefill holds its KV, and has no prompt_logprobs")
        rows = self.slots.geometry.rows
        if len(sequence.tokens) > rows:
            raise Refused(
                f"prompt_tokens: {len(sequence.tokens)} tokens; a live prefill takes {rows}"
            )
        self.scheduler.check(sequence)
        reservation = self.scheduler.reserve(len(sequence.tokens))
        sequence.blocks = list(reservation.blocks)
        plan = StepPlan((Chunk(sequence, 0, len(sequence.tokens), True),))
        return LiveRequest(
            order=order,
            done=done,
            first=done,
            from_new=order == 0,
            request=request,
            generation=generation,
            reservation=reservation,
            plan=plan,
        )

    def ask(self) -> LiveRequest | None:
        """What Old gets; None when there is nothing yet, and `changed` tells of it later.

        Raises NotHeld when another offer is out, or nothing can come any more.
        """
        if self.offered is not None and self.asked:
            return self.offered
        if self.offered is not None:
            raise NotHeld(f"request_id: {self.offered.id} is on its way already")
        self.asked = True
        self._offer()
        return self.offered

    @property
    def drained(self) -> bool:
        """Nothing is left that Old could get, and nothing will come."""
        return self.loaded and not self.waiting and self.executing is None and not self.offered

    def unask(self) -> None:
        """Old does not wait for an answer any more."""
        if self.asked and self.offered is not None:
            self._withdraw(self.offered)
        self.asked = False

    def sent(self) -> None:
        """The answer to `ask` has gone out: the next `ask` is for another request."""
        self.asked = False

    def _offer(self) -> None:
        if self.asked and self.offered is None and self.slots.free:
            one = self._next_for_old()
            if one is not None:
                self.waiting.remove(one)
                if one.hidden is not None:
                    one.slot = self.slots.put(one.hidden)
                self.offered = one
        if self.asked and (self.offered is not None or self.drained):
            self.changed()

    def _next_for_old(self) -> LiveRequest | None:
        if self.policy is Policy.BEST_EFFORT:
            return best_effort_for_old(self.waiting, self.executing)
        return next_for_old(self.waiting, self.executing, self.ready, self.layers, self.targets)

    def acknowledged(self, request_id: int) -> LiveRequest:
        """Old has it. Raises NotHeld when it was withdrawn or cancelled meanwhile."""
        one = self.offered
        if one is None or one.id != request_id:
            raise NotHeld(f"request_id: {request_id} is not on its way from here")
        self._clear_offer(one)
        one.hidden = None
        left = self.layers - one.done
        left_ns = left * self.observed.layer_ns(one.plan.tokens)
        self.observed.given(left_ns, time.monotonic_ns())
        return one

    def withdraw(self, request_id: int) -> None:
        """Old did not say that it has it: goes on here. Idempotent."""
        if self.offered is not None and self.offered.id == request_id:
            self._withdraw(self.offered)

    def _withdraw(self, one: LiveRequest) -> None:
        self._clear_offer(one)
        insort(self.waiting, one, key=_order)

    def _clear_offer(self, one: LiveRequest) -> None:
        self._release_slot(one)
        self.offered = None

    def _release_slot(self, one: LiveRequest) -> None:
        if one.slot is not None:
            self.slots.release(one.slot)
            one.slot = None

    # -- on Old -------------------------------------------------------------------------

    @property
    def takes_more(self) -> bool:
        """Nothing runs or waits here, or only the last layer of one request does: while it
        runs, the next can come, so that Old need not wait for it."""
        free = self.executing is None or self._in_last_layer
        return free and not (self.waiting or self.arriving or self.taken or self.offered)

    def expect(self, request: pb.Request, generation: Generation, done: int) -> LiveRequest:
        """Takes blocks, and a slot for the hidden states after `done` layers. Raises Refused,
        NoRoom."""
        if not 0 <= done < self.layers:
            raise Refused(f"layers_done: {done}; must be in 0..{self.layers - 1}")
        one = self._admit(request, generation, done, 0)
        if done:
            try:
                one.slot = self.slots.reserve(len(generation.sequence.tokens))
            except BaseException:
                self.scheduler.give_back(one.reservation)
                raise
        self.arriving[one.id] = one
        return one

    def arrived(self, request_id: int) -> None:
        """Its hidden states are in its slot. Raises NotHeld when it was cancelled meanwhile."""
        one = self.arriving.pop(request_id)
        if one.gone:
            self._free(one)
            raise NotHeld(f"request_id: {request_id} was cancelled on its way")
        if one.slot is not None:
            one.hidden = self.slots.get(one.slot)
        self.taken.append(one)

    def never_came(self, request_id: int) -> None:
        """Nothing is written to its slot any more."""
        self._free(self.arriving.pop(request_id))

    # -- steps --------------------------------------------------------------------------

    def begin(self) -> LiveStep | None:
        if self.taken:
            self.executing = self.taken.popleft()
            return LiveStep(self.executing, self.layers, taken=True)
        self.executing = self._next_here()
        if self.executing is None:
            return None
        self.last_here = self.executing
        return LiveStep(self.executing, self.executing.done + 1)

    def _next_here(self) -> LiveRequest | None:
        if self.policy is Policy.BEST_EFFORT:
            return best_effort_on_new(self.waiting, self.last_here, self.ready, self.layers)
        return next_on_new(self.waiting, self.ready, self.layers, self.targets)

    def compute(self, step: LiveStep) -> tuple[torch.Tensor, int | None]:
        """(hidden states after `step.last` layers, the new token if those are all)."""
        one, executor, hidden = step.one, self.executor, step.one.hidden
        first = one.done
        if step.taken:
            if first < step.last - 1:
                hidden = executor.run_range(one.plan, first, step.last - 1, hidden)
                first = step.last - 1
            self._in_last_layer = True
            self.ending()
        hidden = executor.run_range(one.plan, first, step.last, hidden)
        if step.last < self.layers:
            return hidden, None
        outcome = executor.conclude(one.plan, hidden, [one.generation])
        one.generation.fault = outcome.spoilt.get(one.id, one.generation.fault)
        return hidden, outcome.tokens[0]

    def finish(self, step: LiveStep, hidden: torch.Tensor | None) -> LiveRequest | None:
        """Takes a step's result, None when it failed. Returns the request when it has left
        the queue, with its reservation: all layers are done, or it failed. What was cancelled
        meanwhile is freed."""
        one, left = step.one, hidden is None or step.last == self.layers
        self.executing, self._in_last_layer = None, False
        if one.gone:
            self._free(one)
        elif left:
            self._forget(one)
        one.done, one.hidden = step.last, None if left else hidden
        self._offer()
        return one if left and not one.gone else None

    def _forget(self, one: LiveRequest) -> None:
        if one in self.waiting:
            self.waiting.remove(one)
        self._release_slot(one)
        one.hidden = None

    def _free(self, one: LiveRequest) -> None:
        self._forget(one)
        self.scheduler.give_back(one.reservation)

    def cancel(self, request_id: int) -> bool:
        """Ends it wherever it is. False when it is not here."""
        one = next((one for one in self._everyone() if one.id == request_id), None)
        if one is None:
            return False
        if one is self.executing or request_id in self.arriving:
            # Its blocks, or its slot, are being written: freed when that is over.
            one.gone = True
            return True
        if one is self.offered:
            self._clear_offer(one)
        if one in self.taken:
            self.taken.remove(one)
        self._free(one)
        self._offer()
        return True


def _order(one: LiveRequest) -> int:
    return one.order
