"""Whole deployments in virtual time: prefill instances, KV links, decode lanes, colocation.

A pipeline of pp stages is modelled as follows. Prefill: a batch enters stage 1 when that is
free and takes 1/pp of the pass in each stage, in order. Decode and colocated: pp batches are
in flight, each a lane with 1/pp of the KV; a lane's step takes a whole pass, and lanes do not
wait for each other (bubbles between uneven lanes are left out, in favour of pipelines).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blitzd.sim.hardware import Link
from blitzd.sim.lane import Job, Lane, Policy
from blitzd.sim.steptimes import StepTimes

PREFILL_BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Replica:
    """One instance of a configuration: its step times, size, and KV tokens in all."""

    steps: StepTimes
    tp: int
    pp: int
    kv_tokens: int

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    def lanes(self, policy: Policy, budget_tokens: int) -> list[Lane]:
        share = self.kv_tokens // self.pp
        return [
            Lane(self.steps, share, policy=policy, budget_tokens=budget_tokens)
            for _ in range(self.pp)
        ]


class PrefillInstance:
    """Batches in order of arrival, up to a token budget; a longer prompt runs alone."""

    def __init__(self, replica: Replica, link: Link | None, kv_bytes_per_token: int) -> None:
        """`link` takes the KV of one request after the other; None: no hand-over."""
        self._steps = replica.steps
        self._stage_free = [0] * replica.pp
        self._queue: deque[Job] = deque()
        self._in_flight: deque[tuple[int, int]] = deque()
        """(end, tokens) of batches, ascending."""
        self._link = link
        self._link_free = 0
        self._kv_bytes_per_token = kv_bytes_per_token
        self.load_tokens = 0
        self.handed_over: list[tuple[int, Job]] = []
        """(time its KV is at the other side, job)"""

    def push(self, job: Job) -> None:
        self._queue.append(job)
        self.load_tokens += job.prompt_tokens

    def advance(self, until: int) -> None:
        """Starts every batch that can start before `until`."""
        while self._queue:
            start = max(self._stage_free[0], self._queue[0].arrival_ns)
            if start >= until:
                break
            batch, tokens = [self._queue.popleft()], 0
            tokens = batch[0].prompt_tokens
            while (
                self._queue
                and self._queue[0].arrival_ns <= start
                and tokens + self._queue[0].prompt_tokens <= PREFILL_BATCH_TOKENS
            ):
                batch.append(self._queue.popleft())
                tokens += batch[-1].prompt_tokens
            self._run(batch, tokens, start)
        while self._in_flight and self._in_flight[0][0] <= until:
            self.load_tokens -= self._in_flight.popleft()[1]

    def _run(self, batch: list[Job], tokens: int, start: int) -> None:
        stages = len(self._stage_free)
        took = self._steps.prefill_ns([job.prompt_tokens for job in batch])
        end = start
        for stage in range(stages):
            end = max(end, self._stage_free[stage]) + -(-took // stages)
            self._stage_free[stage] = end
        self._in_flight.append((end, tokens))
        for job in batch:
            job.first_ns = end
            if job.output_tokens == 1:
                job.end_ns = end
            else:
                self.handed_over.append((self._transfer(job, end), job))

    def _transfer(self, job: Job, ready: int) -> int:
        if self._link is None:
            return ready
        size = job.prompt_tokens * self._kv_bytes_per_token
        start = max(ready, self._link_free)
        self._link_free = start + round(size / self._link.bytes_per_s * 1e9)
        return self._link_free + round(self._link.latency_s * 1e9)


def run_prefill(
    jobs: Sequence[Job],
    replica: Replica,
    count: int,
    link: Link | None = None,
    kv_bytes_per_token: int = 0,
) -> list[tuple[int, Job]]:
    """Sets first-token times on `count` instances, least prompt tokens first. Returns when
    each KV has arrived at the other side, ascending."""
    instances = [PrefillInstance(replica, link, kv_bytes_per_token) for _ in range(count)]
    for job in jobs:
        for instance in instances:
            instance.advance(job.arrival_ns)
        min(instances, key=lambda instance: instance.load_tokens).push(job)
    for instance in instances:
        instance.advance(1 << 62)
    arrived = [pair for instance in instances for pair in instance.handed_over]
    arrived.sort(key=lambda pair: (pair[0], pair[1].arrival_ns))
    return arrived


def run_decode(arrived: Iterable[tuple[int, Job]], replica: Replica, count: int) -> None:
    """Decodes jobs whose KV arrives at the given ascending times, on `count` instances."""
    lanes = [
        lane
        for _ in range(count)
        for lane in replica.lanes(Policy.PREFILL_FIRST, PREFILL_BATCH_TOKENS)
    ]
    for at, job in arrived:
        _least_loaded(lanes, at).push(job, has_kv=True, now=at)
    for lane in lanes:
        lane.drain()


def run_colocated(
    jobs: Sequence[Job], replica: Replica, count: int, policy: Policy, budget_tokens: int
) -> None:
    """Prefill and decode in one place, on `count` instances."""
    lanes = [lane for _ in range(count) for lane in replica.lanes(policy, budget_tokens)]
    for job in jobs:
        _least_loaded(lanes, job.arrival_ns).push(job)
    for lane in lanes:
        lane.drain()


def _least_loaded(lanes: list[Lane], now: int) -> Lane:
    for lane in lanes:
        lane.advance(now)
    return min(lanes, key=lambda lane: lane.outstanding_tokens)


def attainment(
    jobs: Sequence[Job], ttft_ns: int | None, tpot_ns: int | None, warm_up: float
) -> float:
    """Share of jobs within both targets (None: any), after the first `warm_up` of them.

    TPOT runs from the first token to the last, so it holds the hand-over. A job that was
    never served misses.
    """
    counted = jobs[int(len(jobs) * warm_up) :]
    met = 0
    for job in counted:
        if job.end_ns < 0:
            continue
        slow = tpot_ns is not None and job.tpot_ns > tpot_ns
        late = ttft_ns is not None and job.ttft_ns > ttft_ns
        met += not (slow or late)
    return met / len(counted)
