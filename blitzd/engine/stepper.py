"""A replica's requests and the step that moves them.

A step has three parts: `begin` picks its tokens, `compute` runs them, `finish` takes the
result. Only `compute` is long, and it touches nothing that the others change, so requests
come, go and are handed over while it runs. The step loop's lock guards everything else.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import structlog
import torch

from blitzd.engine.errors import InvalidField, NotHeld
from blitzd.engine.executor import Executor
from blitzd.engine.generation import Generation, Grammar, admit
from blitzd.engine.scoring import PromptScores
from blitzd.engine.token_logprobs import append
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import Finish, NoRoom, Phase, Refused, Reservation, Scheduler, StepPlan

log = structlog.get_logger()

WAITING = 1024
"""Requests that may wait for their first step."""

FINISH = {
    Finish.NONE: pb.FinishReason.NONE,
    Finish.STOP: pb.FinishReason.STOP,
    Finish.LENGTH: pb.FinishReason.LENGTH,
    Finish.HELD: pb.FinishReason.HELD,
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0


class Row(NamedTuple):
    """What a step made for one request."""

    token: int
    text: str
    last: bool


class Result(NamedTuple):
    rows: list[Row]
    scores: list[PromptScores]
    spoilt: Mapping[int, str]
    """Requests whose numbers are not finite, and where."""
    hidden: torch.Tensor | None = None
    """Of a step that ended between two layers, or after the last, of one request."""


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    began_ns: int
    plan: StepPlan
    sampling: list[Generation]
    scoring: list[Generation]
    """Those with prompt tokens in it whose logprobs are wanted."""


class Stepper:
    def __init__(
        self, executor: Executor, scheduler: Scheduler, tokenizer: Tokenizer, vocab: int
    ) -> None:
        self.steps = 0
        self._executor = executor
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._generations: dict[int, Generation] = {}
        self._importing: dict[int, tuple[Reservation, Generation]] = {}

    @property
    def occupancy(self) -> Occupancy:
        scheduler = self._scheduler
        return Occupancy(
            scheduler.running,
            scheduler.waiting,
            scheduler.blocks.used,
            scheduler.blocks.blocks_total,
        )

    @property
    def request_ids(self) -> list[int]:
        """In whatever phase, imports included."""
        return [*self._generations, *self._importing]

    # -- requests -----------------------------------------------------------------------

    def prefill(self, request: pb.Request, hold: bool, grammar: Grammar | None = None) -> None:
        """Queues it. `grammar` restricts its tokens here, and does not travel with it. Raises
        InvalidField, Refused, NoRoom."""
        if self._scheduler.waiting >= WAITING:
            raise NoRoom(f"{WAITING} requests wait already")
        generation = admit(request, self._tokenizer, self._vocab, hold=hold, grammar=grammar)
        self._scheduler.add(generation.sequence)
        self._generations[request.request_id] = generation

    def reserve(self, request: pb.Request, grammar: Grammar | None = None) -> list[int]:
        """Takes blocks for all tokens of a request whose KV comes from elsewhere.

        Returns the ids of those that the KV of all tokens but the last goes to. Raises
        InvalidField, Refused (it can never run here), NoRoom.
        """
        generation = admit(request, self._tokenizer, self._vocab, hold=False, grammar=grammar)
        sequence = generation.sequence
        if not sequence.output_tokens:
            raise InvalidField(
                "request.output_tokens: empty; the source's first token is where this goes on"
            )
        if sequence.id in self._importing:
            raise Refused(f"request_id: {sequence.id} is being imported already")
        self._scheduler.check(sequence)
        reservation = self._scheduler.reserve(len(sequence.tokens))
        self._importing[sequence.id] = (reservation, generation)
        return list(reservation.blocks[: self._scheduler.blocks.blocks_for(reservation.tokens - 1)])

    def adopt(self, request_id: int, lease: int) -> None:
        """Runs an imported request: the KV of all its tokens but the last has come, by `lease`.

        Raises NotHeld when its reservation is gone, Refused.
        """
        if request_id not in self._importing:
            raise NotHeld(f"request_id: {request_id} was cancelled while it was imported")
        reservation, generation = self._importing[request_id]
        self._scheduler.adopt(reservation, generation.sequence, reservation.tokens - 1)
        del self._importing[request_id]
        generation.lease = lease
        self._generations[request_id] = generation

    def give_back(self, request_id: int) -> None:
        """Ends an import that came to nothing. Idempotent."""
        found = self._importing.pop(request_id, None)
        if found is not None:
            self._scheduler.give_back(found[0])

    def held(self, request_id: int) -> tuple[int, list[int]]:
        """(tokens whose KV is there, ids of its blocks). Raises NotHeld."""
        sequence = self._scheduler.get(request_id)
        if sequence is None or sequence.phase is not Phase.HELD:
            phase = "not here" if sequence is None else sequence.phase.value
            raise NotHeld(f"request_id: {request_id} is {phase}; only a held one has KV to give")
        return sequence.computed, list(sequence.blocks)

    def release(self, request_ids: Collection[int]) -> int:
        """Frees those of them that are held. Returns how many were."""
        return self._end([i for i in request_ids if self._scheduler.release(i)])

    def hold(self, request_ids: Collection[int]) -> list[int]:
        """Stops those of them that run after their next token; their KV stays. Returns those
        that are, or will be, held."""
        return [i for i in request_ids if self._scheduler.hold(i)]

    def resume(self, request_ids: Collection[int]) -> None:
        """Lets those of them that are held go on here. Raises Refused for one whose end can
        never fit; it stays held."""
        for request_id in request_ids:
            self._scheduler.resume(request_id)

    def cancel(self, request_ids: Collection[int], up_to_lease: int | None = None) -> int:
        """Forgets them, whatever their phase; with `up_to_lease`, those that came by a lease up
        to it. Returns how many were here."""
        if up_to_lease is not None:
            request_ids = [i for i in request_ids if 0 < self._lease_of(i) <= up_to_lease]
        return self._end([i for i in request_ids if self._scheduler.cancel(i)])

    def _lease_of(self, request_id: int) -> int:
        found = self._generations.get(request_id)
        return 0 if found is None else found.lease

    def reset(self) -> None:
        """Forgets every request. Imports are their importer's to end."""
        self.cancel(self._scheduler.sequence_ids())

    def _end(self, request_ids: list[int]) -> int:
        for request_id in request_ids:
            del self._generations[request_id]
        return len(request_ids)

    # -- steps --------------------------------------------------------------------------

    def begin(self) -> Step | None:
        """The next step; None when there is nothing that can run."""
        began = time.monotonic_ns()
        plan = self._scheduler.schedule()
        if not plan.chunks:
            return None
        self.steps += 1
        sampling = [self._generations[chunk.sequence.id] for chunk in plan.sampling]
        scoring = [
            self._generations[chunk.sequence.id]
            for chunk in plan.chunks
            if chunk.sequence.uncached and chunk.start + 1 < chunk.sequence.prompt_tokens
        ]
        return Step(self.steps, began, plan, sampling, scoring)

    def compute(self, step: Step) -> Result | Exception:
        """Runs it. A failure is a result too: the step's requests end with it, the others
        go on."""
        try:
            outcome = self._executor.run(step.plan, step.sampling, step.scoring)
            rows = [
                row_of(generation, token)
                for generation, token in zip(step.sampling, outcome.tokens, strict=True)
            ]
            return Result(rows, outcome.scores, outcome.spoilt)
        except Exception as error:
            log.exception("step failed", step=step.number, requests=len(step.plan.chunks))
            return error

    def finish(self, step: Step, result: Result | Exception) -> pb.StepReport:
        report = pb.StepReport()
        if isinstance(result, Exception):
            self._fail(report, step, result)
        else:
            self._add_scores(report, result.scores)
            self._complete(report, step, result)
        self._add_occupancy(report)
        report.prefill_tokens = sum(c.count for c in step.plan.chunks if c.count > 1)
        report.step_ns = time.monotonic_ns() - step.began_ns
        return report

    def _complete(self, report: pb.StepReport, step: Step, result: Result) -> None:
        rows = result.rows
        stopped = {
            generation.sequence.id
            for generation, row in zip(step.sampling, rows, strict=True)
            if row.last
        }
        finishes = self._scheduler.complete(
            step.plan, [row.token for row in rows], stopped, result.spoilt
        )
        self._give_up_spoilt(report, step, result.spoilt)
        for generation, row, finish in zip(step.sampling, rows, finishes, strict=True):
            sequence = generation.sequence
            if self._generations.get(sequence.id) is not generation:
                continue  # cancelled while it was computed, or given up
            if generation.fault:
                self._give_up(report, generation)
                continue
            add_row(report, generation, row, finish)
            if finish in (Finish.STOP, Finish.LENGTH):
                del self._generations[sequence.id]

    def _give_up_spoilt(self, report: pb.StepReport, step: Step, spoilt: Mapping[int, str]) -> None:
        for chunk in step.plan.chunks if spoilt else ():
            generation = self._generations.get(chunk.sequence.id)
            if generation is None or generation.sequence is not chunk.sequence:
                continue  # cancelled while it was computed
            if fault := spoilt.get(chunk.sequence.id):
                log.error("request spoilt", step=step.number, request=chunk.sequence.id, why=fault)
                generation.fault = fault
                self._give_up(report, generation)

    def _give_up(self, report: pb.StepReport, generation: Generation) -> None:
        self._scheduler.cancel(generation.sequence.id)
        self._end([generation.sequence.id])
        report.failed_ids.append(generation.sequence.id)
        report.errors.append(generation.fault)
        report.failed_alone.append(True)

    def _add_scores(self, report: pb.StepReport, scores: list[PromptScores]) -> None:
        for generation, first, found in scores:
            if generation.sequence.phase is not Phase.ENDED:
                generation.scored = first + len(found)
                append(report, generation.sequence.id, first, found)

    def _fail(self, report: pb.StepReport, step: Step, error: Exception) -> None:
        live = [c.sequence.id for c in step.plan.chunks if c.sequence.phase is not Phase.ENDED]
        self._scheduler.abort(step.plan)
        self._end(live)
        reason = f"step {step.number} failed: {type(error).__name__}: {error}"
        report.failed_ids, report.errors = live, [reason] * len(live)
        report.failed_alone = [False] * len(live)

    def idle_report(self) -> pb.StepReport:
        """Occupancy alone, for when it changed without a step."""
        report = pb.StepReport()
        self._add_occupancy(report)
        return report

    def _add_occupancy(self, report: pb.StepReport) -> None:
        now = self.occupancy
        report.step = self.steps
        report.running, report.waiting = now.running, now.waiting
        report.blocks_used, report.blocks_total = now.blocks_used, now.blocks_total

    def audit(self) -> None:
        """Raises AssertionError when a block or a request is unaccounted for."""
        self._scheduler.audit()
        if set(self._generations) != set(self._scheduler.sequence_ids()):
            raise AssertionError("requests and sequences differ")


def add_row(report: pb.StepReport, generation: Generation, row: Row, finish: Finish) -> None:
    """Of a request whose tokens end with the row's."""
    sequence = generation.sequence
    report.request_ids.append(sequence.id)
    report.token_ids.append(row.token)
    text = row.text
    if finish is Finish.LENGTH:
        text += generation.detokenizer.flush()
        if generation.detokenizer.stopped:
            # Its text lacks what came last, as that of any other that was stopped.
            finish = Finish.STOP
    report.texts.append(text)
    report.finish.append(FINISH[finish])
    report.cached_tokens.append(0 if generation.reported else sequence.cached_tokens)
    generation.reported = True
    if generation.chosen is not None:
        append(report, sequence.id, len(sequence.tokens) - 1, [generation.chosen])


def row_of(generation: Generation, token: int) -> Row:
    if generation.fault:
        return Row(token, "", True)
    try:
        return Row(token, *generation.feed(token))
    except ValueError as error:
        # A model may have more ids than its tokenizer, and a bias can bring one up.
        generation.fault = str(error)
        return Row(token, "", True)
