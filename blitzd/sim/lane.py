"""One running batch: the inner simulator, token-exact, that jumps over equal steps.

A *lane* is one batch in flight on a replica; a pipeline of pp stages keeps pp of them.
Between two changes of the batch every decode step differs from the last by a constant, so a
run of steps is one addition, whatever its length. An iteration starts at a *boundary*; what
arrived by then can join it.

KV is counted in tokens. A sequence is admitted when the KV that it has (or will have after
its prompt) fits; when a step would not fit, the newest sequence gives up its KV, waits first
in line, and has all its tokens computed again, as the live scheduler does.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from enum import Enum
from math import isqrt
from typing import NamedTuple

from blitzd.sim.steptimes import Chunk, StepTimes

UNBOUNDED = 1 << 62


class Policy(Enum):
    PREFILL_FIRST = "prefill-first"
    """Waiting prompts run as a batch of their own and hold up the decodes."""
    CHUNKED = "chunked"
    """Each pass has a token budget; decodes come first, chunks of prompts fill it up."""


@dataclass(slots=True)
class Job:
    """One request. Times are ns, -1 until known."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    first_ns: int = -1
    end_ns: int = -1

    @property
    def ttft_ns(self) -> int:
        return self.first_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> float:
        """Mean time of the tokens after the first; 0 when there are none."""
        return (self.end_ns - self.first_ns) / max(1, self.output_tokens - 1)


@dataclass(slots=True)
class Waiting:
    job: Job
    tokens: int
    """Known tokens: the prompt, and those produced before a preemption."""
    left: int
    """Output tokens still to come."""
    has_kv: bool = False
    """KV of all but the last token is here already: it goes straight to decoding."""


class Running(NamedTuple):
    """Ordered by `end_step`, ties by `order`, which no two share."""

    end_step: int
    order: int
    joined_step: int
    tokens: int
    """Known tokens when it joined."""
    job: Job


class Lane:
    """Push jobs in order of time, each after `advance` to its time; then `drain`."""

    def __init__(
        self,
        steps: StepTimes,
        kv_tokens: int = UNBOUNDED,
        max_batch: int = 1024,
        policy: Policy = Policy.PREFILL_FIRST,
        budget_tokens: int = 2048,
    ) -> None:
        """`budget_tokens` bounds a prefill batch (a longer prompt runs alone) or, under
        CHUNKED, every pass."""
        self.steps = steps
        self.kv_tokens = kv_tokens
        self.max_batch = max_batch
        self.policy = policy
        self.budget_tokens = budget_tokens
        self.now = 0
        self.outstanding_tokens = 0
        """Prompt and output tokens of all jobs here, the dispatcher's measure of load."""
        self.preemptions = 0
        self._step = 0
        self._order = 0
        self._running: list[Running] = []
        self._context = 0
        """KV tokens that the next decode step reads: all known tokens of the running."""
        self._waiting: deque[Waiting] = deque()
        self._prefilling: deque[tuple[Waiting, int]] = deque()
        """Under CHUNKED: admitted, with the number of tokens computed."""
        self._reserved = 0
        """KV tokens of the prefilling."""

    def push(self, job: Job, has_kv: bool = False, now: int | None = None) -> bool:
        """Queues a job, at its arrival or at `now`. False, and no times ever, when it could
        never fit: its KV at the end exceeds the lane's."""
        if job.prompt_tokens + job.output_tokens > self.kv_tokens:
            return False
        at = job.arrival_ns if now is None else now
        if not self._running and not self._waiting and not self._prefilling:
            self.now = max(self.now, at)
        self.outstanding_tokens += job.prompt_tokens + job.output_tokens
        produced = 1 if has_kv else 0
        tokens, left = job.prompt_tokens + produced, job.output_tokens - produced
        self._waiting.append(Waiting(job, tokens, left, has_kv))
        return True

    def drain(self) -> None:
        self.advance(UNBOUNDED)

    def advance(self, until: int) -> None:
        """Runs every iteration that starts before `until`."""
        while self.now < until:
            if self.policy is Policy.CHUNKED:
                self._admit_chunked()
                if self._prefilling:
                    self._chunked_pass()
                    continue
            elif self._waiting and self._prefill_pass():
                continue
            if not self._running:
                return
            self._decode_run(until)

    # -- decoding -----------------------------------------------------------------------

    def _decode_run(self, until: int) -> None:
        """Equal decode steps in one jump: up to the next end, the last step that KV has room
        for, or the first boundary at or after `until`."""
        self._make_room()
        batch = len(self._running)
        base, slope = self.steps.decode(batch)
        first, growth = base + slope * self._context, slope * batch
        count = self._running[0].end_step - self._step
        count = min(count, (self.kv_tokens - self._context) // batch + 1)
        if count > 1:
            count = min(count, steps_to_reach(first, growth, until - self.now))
        self.now += count * first + growth * (count * (count - 1) // 2)
        self._context += count * batch
        self._step += count
        self._retire()

    def _make_room(self) -> None:
        while self._context + self._reserved > self.kv_tokens:
            self._preempt()

    def _preempt(self) -> None:
        victim = max(self._running, key=lambda running: running.order)
        self._running.remove(victim)
        heapq.heapify(self._running)
        tokens = victim.tokens + self._step - victim.joined_step
        self._context -= tokens
        self._waiting.appendleft(Waiting(victim.job, tokens, victim.end_step - self._step))
        self.preemptions += 1

    def _retire(self) -> None:
        running = self._running
        while running and running[0].end_step == self._step:
            ended = heapq.heappop(running)
            self._context -= ended.tokens + self._step - ended.joined_step
            self._finish(ended.job)

    def _finish(self, job: Job) -> None:
        job.end_ns = self.now
        self.outstanding_tokens -= job.prompt_tokens + job.output_tokens

    def _join(self, job: Job, tokens: int, left: int) -> None:
        """Starts decoding: `tokens` are known, the last of them not yet in the KV cache."""
        heapq.heappush(
            self._running, Running(self._step + left, self._order, self._step, tokens, job)
        )
        self._order += 1
        self._context += tokens

    def _computed(self, waiting: Waiting) -> None:
        """All tokens of `waiting` are computed: the next one is out."""
        if waiting.job.first_ns < 0:
            waiting.job.first_ns = self.now
        if waiting.left == 1:
            self._finish(waiting.job)
        else:
            self._join(waiting.job, waiting.tokens + 1, waiting.left - 1)

    def _next_admissible(self, admitted: int = 0) -> Waiting | None:
        """The first in line, if batch and KV have room for it beside `admitted` more."""
        if not self._waiting:
            return None
        if len(self._running) + len(self._prefilling) + admitted >= self.max_batch:
            return None
        waiting = self._waiting[0]
        if self._context + self._reserved + waiting.tokens + 1 > self.kv_tokens:
            return None
        return waiting

    # -- prefill first ------------------------------------------------------------------

    def _prefill_pass(self) -> bool:
        """Admits in order; runs the prompts among them as one pass. False without any."""
        batch: list[Waiting] = []
        budget = self.budget_tokens
        while (waiting := self._next_admissible(len(batch))) is not None:
            if waiting.has_kv:
                self._waiting.popleft()
                if waiting.left == 0:
                    self._finish(waiting.job)
                else:
                    self._join(waiting.job, waiting.tokens, waiting.left)
                continue
            if batch and waiting.tokens > budget:
                break
            budget -= waiting.tokens
            self._reserved += waiting.tokens + 1
            batch.append(self._waiting.popleft())
        if not batch:
            return False
        self.now += self.steps.prefill_ns([waiting.tokens for waiting in batch])
        self._reserved = 0
        for waiting in batch:
            self._computed(waiting)
        return True

    # -- chunked ------------------------------------------------------------------------

    def _admit_chunked(self) -> None:
        """Prompts come in while this pass's budget has tokens for them."""
        budget = self.budget_tokens - len(self._running)
        budget -= sum(waiting.tokens - done for waiting, done in self._prefilling)
        while budget > 0 and (waiting := self._next_admissible()) is not None:
            self._waiting.popleft()
            self._prefilling.append((waiting, 0))
            self._reserved += waiting.tokens + 1
            budget -= waiting.tokens

    def _chunked_pass(self) -> None:
        self._make_room()
        batch, context = len(self._running), self._context
        budget = max(1, self.budget_tokens - batch)
        chunks: list[Chunk] = []
        done: list[Waiting] = []
        while self._prefilling and budget > 0:
            waiting, past = self._prefilling.popleft()
            new = min(budget, waiting.tokens - past)
            chunks.append((new, past))
            budget -= new
            if past + new < waiting.tokens:
                self._prefilling.appendleft((waiting, past + new))
            else:
                done.append(waiting)
        self.now += self.steps.mixed_ns(chunks, batch, context)
        self._step += 1
        self._context += batch
        self._retire()
        for waiting in done:
            self._reserved -= waiting.tokens + 1
            self._computed(waiting)


def steps_to_reach(first: int, growth: int, span: int) -> int:
    """The least k >= 1 with k * first + growth * k (k-1) / 2 >= span. `first` > 0."""
    if span <= first:
        return 1
    if growth == 0:
        return -(-span // first)
    linear = 2 * first - growth
    k = max(1, (isqrt(linear * linear + 8 * growth * span) - linear) // (2 * growth))
    while k * first + growth * (k * (k - 1) // 2) < span:
        k += 1
    return k
