"""The live scheduler in virtual time: `blitzd.sched` decides every step, a model prices it."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from blitzd.sched import (
    BlockManager,
    Finish,
    NoRoom,
    Refused,
    Scheduler,
    Sequence as Scheduled,
    StepPlan,
)
from blitzd.sim.errors import InputError
from blitzd.sim.lane import Job

StepCost = Callable[[StepPlan], int]
"""ns that a step takes."""


@dataclass(slots=True)
class Totals:
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    computed_tokens: int = 0
    swapped_tokens: int = 0
    """KV tokens written out; as many come back."""


@dataclass(slots=True)
class Replay:
    """One replica. Jobs ascend in arrival time; `run` sets their times.

    `swap_ns_per_token` > 0 swaps: a preempted sequence's KV goes to host memory and comes
    back by a reservation, before anything new is admitted; each way costs that much.
    0 recomputes, as the live engine does.
    """

    jobs: Sequence[Job]
    scheduler: Scheduler
    cost: StepCost
    shared_prefix: int = 0
    """Leading prompt tokens that all jobs have in common."""
    swap_ns_per_token: int = 0
    now: int = 0
    totals: Totals = field(default_factory=Totals)
    _swapped: deque[Scheduled] = field(default_factory=deque)
    _ids: Iterator[int] = field(default_factory=lambda: count(1))
    _prefix: list[int] = field(default_factory=list)

    def run(
        self,
        until: int | None = None,
        on_step: Callable[[StepPlan, list[tuple[int, bool, bool]]], None] | None = None,
    ) -> None:
        """Serves all jobs, or what starts before `until`. After each step `on_step` gets the
        plan and (job index, it was its first token, its last) of every token made.

        Raises InputError for a job that can never run here.
        """
        self._prefix = list(islice(self._ids, self.shared_prefix))
        arriving = deque(enumerate(self.jobs))
        while arriving or self._busy():
            if not self._busy():
                self.now = max(self.now, arriving[0][1].arrival_ns)
            if until is not None and self.now >= until:
                return
            self._swap_in()
            while arriving and not self._swapped and arriving[0][1].arrival_ns <= self.now:
                self._add(*arriving.popleft())
            plan = self.scheduler.schedule()
            self._count(plan)
            if self.swap_ns_per_token:
                self._swap_out(plan)
            made = self._complete(plan)
            if on_step is not None:
                on_step(plan, made)

    def _busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._swapped)

    def _add(self, index: int, job: Job) -> None:
        own = job.prompt_tokens - self.shared_prefix
        if own < 1:
            raise InputError(
                f"request {index}: prompt_tokens: {job.prompt_tokens} must be above the shared "
                f"prefix of {self.shared_prefix}"
            )
        tokens = self._prefix + list(islice(self._ids, own))
        try:
            self.scheduler.add(Scheduled(index, tokens, job.prompt_tokens, job.output_tokens))
        except Refused as error:
            raise InputError(f"request {index}: {error}") from error

    def _count(self, plan: StepPlan) -> None:
        self.totals.steps += 1
        self.totals.preemptions += len(plan.preempted)
        for chunk in plan.chunks:
            self.totals.computed_tokens += chunk.count
            sequence = chunk.sequence
            if sequence.preemptions == 0 and chunk.start == sequence.cached_tokens:
                self.totals.cached_tokens += sequence.cached_tokens

    def _complete(self, plan: StepPlan) -> list[tuple[int, bool, bool]]:
        self.now += self.cost(plan)
        sampling = plan.sampling
        finishes = self.scheduler.complete(plan, list(islice(self._ids, len(sampling))))
        made = []
        for chunk, finish in zip(sampling, finishes, strict=True):
            index = chunk.sequence.id
            job = self.jobs[index]
            first, last = job.first_ns < 0, finish is not Finish.NONE
            if first:
                job.first_ns = self.now
            if last:
                job.end_ns = self.now
            made.append((index, first, last))
        return made

    def _swap_out(self, plan: StepPlan) -> None:
        for victim in plan.preempted:
            self.scheduler.cancel(victim.id)
            self._swapped.append(victim)
            self.totals.swapped_tokens += len(victim.tokens) - 1
            self.now += (len(victim.tokens) - 1) * self.swap_ns_per_token

    def _swap_in(self) -> None:
        while self._swapped:
            victim = self._swapped[0]
            known = len(victim.tokens)
            try:
                room = self.scheduler.reserve(known)
            except NoRoom:
                return
            self._swapped.popleft()
            back = Scheduled(victim.id, victim.tokens, victim.prompt_tokens, victim.max_tokens)
            self.scheduler.adopt(room, back, known - 1)
            self.now += (known - 1) * self.swap_ns_per_token


def scheduler_for(
    kv_blocks: int, block_tokens: int, max_batch_tokens: int, max_batch_size: int
) -> Scheduler:
    """The live scheduler over so many KV blocks. No context limit cuts an output short: what
    does not fit the blocks is refused."""
    return Scheduler(
        BlockManager(kv_blocks, block_tokens),
        context_tokens=1 << 40,
        max_batch_tokens=max_batch_tokens,
        max_batch_size=max_batch_size,
    )
