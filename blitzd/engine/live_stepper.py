"""A stepper that also runs prefills a layer at a time, here and with a paired replica."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import structlog

from blitzd.engine.errors import NotHeld
from blitzd.engine.executor import Executor
from blitzd.engine.generation import Generation, Grammar, admit
from blitzd.engine.hidden_slots import HiddenSlots
from blitzd.engine.live import LiveQueue, LiveRequest, LiveStep
from blitzd.engine.stepper import Occupancy, Result, Row, Step, Stepper, add_row, row_of
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import Finish, NoRoom, Phase, Refused, Scheduler
from blitzd.sched.zigzag import Policy

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LayerStep(Step):
    live: LiveStep

    @staticmethod
    def is_news(report: pb.StepReport) -> bool:
        """A layer alone is not: one message each would be the daemon's load."""
        return bool(report.request_ids or report.failed_ids or report.relayed_ids)


class LiveStepper(Stepper):
    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        vocab: int,
        layers: int,
        slots: HiddenSlots,
        policy: Policy = Policy.ILP_FREE,
    ) -> None:
        super().__init__(executor, scheduler, tokenizer, vocab)
        self.live = LiveQueue(executor, scheduler, layers, slots, policy)
        self._held_layers: dict[int, tuple[int, int]] = {}
        """Of held requests that ran some of their layers here: [first, last)."""
        self._relayed: list[tuple[int, int]] = []
        """(request, layers that ran on New), to be reported."""

    @property
    def occupancy(self) -> Occupancy:
        now = super().occupancy
        waiting = now.waiting + len(self.live.ids)
        return Occupancy(now.running, waiting, now.blocks_used, now.blocks_total)

    @property
    def request_ids(self) -> list[int]:
        return [*super().request_ids, *self.live.ids]

    @property
    def idle(self) -> bool:
        """Nothing runs or waits here."""
        now = super().occupancy
        return not now.running and not now.waiting and not self.live.ids

    @property
    def takes_more(self) -> bool:
        """A request of the paired replica can run here, at once or after one more layer."""
        now = super().occupancy
        return not now.running and not now.waiting and self.live.takes_more

    # -- requests -----------------------------------------------------------------------

    def prefill(self, request: pb.Request, hold: bool, grammar: Grammar | None = None) -> None:
        """Queues it. While weights arrive, it runs as far as the layers that are there, which
        takes `hold`."""
        self._refuse_known(request.request_id)
        if self.live.loaded:
            super().prefill(request, hold, grammar)
        else:
            generation = admit(request, self._tokenizer, self._vocab, hold=hold, grammar=grammar)
            self.live.add(request, generation)

    def _refuse_known(self, request_id: int) -> None:
        if request_id in self.live.ids:
            raise Refused(f"request_id: {request_id} is here already")

    def reserve(self, request: pb.Request, grammar: Grammar | None = None) -> list[int]:
        if not self.live.loaded:
            raise NoRoom("the weights are still arriving")
        self._refuse_known(request.request_id)
        return super().reserve(request, grammar)

    def held(self, request_id: int, layers: tuple[int, int] | None = None) -> tuple[int, list[int]]:
        """With `layers`, of [first, last) of them; else of all."""
        first, last = self._held_layers.get(request_id, (0, self.live.layers))
        wanted = layers or (0, self.live.layers)
        if wanted[0] < first or wanted[1] > last:
            raise NotHeld(
                f"request_id: {request_id} has layers [{first}, {last}) here, not all of "
                f"[{wanted[0]}, {wanted[1]})"
            )
        return super().held(request_id)

    def resume(self, request_ids: Collection[int]) -> None:
        for request_id in request_ids:
            if request_id in self._held_layers:
                raise Refused(f"request_id: {request_id} has only some of its layers here")
        super().resume(request_ids)

    def cancel(self, request_ids: Collection[int], up_to_lease: int | None = None) -> int:
        live = 0
        if up_to_lease is None:
            live = sum(self.live.cancel(request_id) for request_id in request_ids)
        return live + super().cancel(request_ids, up_to_lease)

    def reset(self) -> None:
        super().reset()
        for request_id in self.live.ids:
            self.live.cancel(request_id)

    def _end(self, request_ids: list[int]) -> int:
        for request_id in request_ids:
            self._held_layers.pop(request_id, None)
        return super()._end(request_ids)

    # -- between the two of a pair ------------------------------------------------------

    def expect(self, request: pb.Request, layers_done: int) -> LiveRequest:
        """On Old: takes blocks, and room for hidden states, for a request that New has begun.
        Raises InvalidField, Refused, NoRoom."""
        if self._scheduler.get(request.request_id) is not None:
            raise Refused(f"request_id: {request.request_id} is here already")
        generation = admit(request, self._tokenizer, self._vocab, hold=True)
        return self.live.expect(request, generation, layers_done)

    def acknowledged(self, request_id: int) -> int:
        """On New: Old has the request, and what ran here stays held for export. Returns how
        many layers that were. Raises NotHeld when it was cancelled or goes on here."""
        one = self.live.acknowledged(request_id)
        if one.done:
            self._keep(one, len(one.generation.sequence.tokens), (0, one.done))
        else:
            self._scheduler.give_back(one.reservation)
        self._relayed.append((request_id, one.done))
        return one.done

    def _keep(self, one: LiveRequest, computed: int, layers: tuple[int, int]) -> None:
        self._scheduler.keep(one.reservation, one.generation.sequence, computed)
        self._generations[one.id] = one.generation
        if layers != (0, self.live.layers):
            self._held_layers[one.id] = layers

    # -- steps --------------------------------------------------------------------------

    def begin(self) -> Step | None:
        began = time.monotonic_ns()
        live = self.live.begin()
        if live is None:
            return super().begin()
        self.steps += 1
        return LayerStep(self.steps, began, live.one.plan, [], [], live)

    def compute(self, step: Step) -> Result | Exception:
        if not isinstance(step, LayerStep):
            return super().compute(step)
        try:
            hidden, token = self.live.compute(step.live)
            rows = [] if token is None else [row_of(step.live.one.generation, token)]
            return Result(rows, [], {}, hidden)
        except Exception as error:
            log.exception("layers failed", step=step.number, request=step.live.one.id)
            return error

    def finish(self, step: Step, result: Result | Exception) -> pb.StepReport:
        if not isinstance(step, LayerStep):
            return super().finish(step, result)
        report = pb.StepReport()
        step_ns = time.monotonic_ns() - step.began_ns
        self.live.observed.ran(step.plan.tokens, step_ns // (step.live.last - step.live.one.done))
        self._finish_layers(report, step, result)
        self._add_occupancy(report)
        report.prefill_tokens = step.plan.tokens
        report.step_ns = step_ns
        return report

    def _finish_layers(
        self, report: pb.StepReport, step: LayerStep, result: Result | Exception
    ) -> None:
        if isinstance(result, Exception):
            one = self.live.finish(step.live, None)
            if one is not None:
                error = f"step {step.number} failed: {type(result).__name__}: {result}"
                self._fail_live(report, one, error, alone=False)
            return
        one = self.live.finish(step.live, result.hidden)
        if one is None:
            return
        (row,) = result.rows
        if one.generation.fault:
            self._fail_live(report, one, one.generation.fault, alone=True)
        else:
            finish = self._take_token(one, one.generation, row)
            if one.from_new:
                # With the token, so that who exports the KV need not have heard of New's report;
                # and of a request that is over, so that somebody lets go of it here.
                self._relayed.append((one.id, one.first))
            add_row(report, one.generation, row, finish)

    def _fail_live(
        self, report: pb.StepReport, one: LiveRequest, error: str, *, alone: bool
    ) -> None:
        self._scheduler.give_back(one.reservation)
        report.failed_ids.append(one.id)
        report.errors.append(error)
        report.failed_alone.append(alone)

    def _take_token(self, one: LiveRequest, generation: Generation, row: Row) -> Finish:
        sequence = generation.sequence
        sequence.tokens.append(row.token)
        if not row.last and not self._scheduler.at_length(sequence):
            self._keep(one, len(sequence.tokens) - 1, (one.first, self.live.layers))
            return Finish.HELD
        sequence.phase = Phase.ENDED
        self._scheduler.give_back(one.reservation)
        return Finish.STOP if row.last else Finish.LENGTH

    def _add_occupancy(self, report: pb.StepReport) -> None:
        super()._add_occupancy(report)
        report.relayed_ids = [request_id for request_id, _ in self._relayed]
        report.relayed_layers = [layers for _, layers in self._relayed]
        self._relayed.clear()
