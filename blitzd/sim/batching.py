"""Static against continuous batching, on one replica, in exact virtual time.

The cost model is the lab's: a prompt costs 0.05 ms a token, a decode step 8 ms whatever
its batch, and every output token, the first one too, comes out of a decode step. An
*iteration* fills free slots from the queue (first come, first served), prefills those
newcomers one after the other, and runs one decode step for all that hold a slot.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blitzd.sim.requests import Request
from blitzd.sim.stats import percentile

PREFILL_NS_PER_TOKEN = 50_000
DECODE_STEP_NS = 8_000_000


class Slots(list[tuple[int, int]]):
    """Slots in use over time: (decode steps, slots in use) runs, in order."""

    def add(self, steps: int, used: int) -> None:
        if self and self[-1][1] == used:
            self[-1] = (self[-1][0] + steps, used)
        else:
            self.append((steps, used))


@dataclass(slots=True)
class StepCount:
    """A run that counts decode steps only (all requests there at the start)."""

    total_steps: int = 0
    peak_running: int = 0
    output_tokens: int = 0
    slots: Slots = field(default_factory=Slots)

    @property
    def throughput_tps(self) -> float:
        """Output tokens per second at 8 ms a step."""
        return self.output_tokens * 1e9 / (self.total_steps * DECODE_STEP_NS)

    def slot_util(self, slots: int) -> float:
        """Share of all slot-steps, idle places of a short batch included, that made a token."""
        return self.output_tokens / (slots * self.total_steps)


def run_static(requests: Sequence[Request], batch_size: int) -> StepCount:
    """Batches in list order; a batch holds its slots until its longest request ends."""
    run = StepCount()
    for start in range(0, len(requests), batch_size):
        outputs = sorted(r.output_tokens for r in requests[start : start + batch_size])
        done = 0
        for index, output in enumerate(outputs):
            if output > done:
                run.slots.add(output - done, len(outputs) - index)
                done = output
        run.total_steps += done
        run.output_tokens += sum(outputs)
        run.peak_running = max(run.peak_running, len(outputs))
    return run


def run_continuous(requests: Sequence[Request], max_num_seqs: int) -> StepCount:
    """Every slot is refilled from the queue at the step after it came free."""
    run = StepCount(output_tokens=sum(r.output_tokens for r in requests))
    ends: list[int] = []
    queue = deque(requests)
    step = 0
    while queue or ends:
        while queue and len(ends) < max_num_seqs:
            heapq.heappush(ends, step + queue.popleft().output_tokens)
        run.peak_running = max(run.peak_running, len(ends))
        run.slots.add(ends[0] - step, len(ends))
        step = ends[0]
        while ends and ends[0] == step:
            heapq.heappop(ends)
    run.total_steps = step
    return run


@dataclass(slots=True)
class TimedRun:
    """A run in time. One entry per request, in order of admission; times in ns."""

    wait_ns: list[int] = field(default_factory=list)
    """From arrival (submission) to the start of the iteration that gives it a slot."""
    ttft_ns: list[int] = field(default_factory=list)
    """From arrival to the end of the decode step that makes its first token."""
    end_ns: int = 0
    output_tokens: int = 0
    peak_running: int = 0

    @property
    def throughput_tps(self) -> float:
        return self.output_tokens * 1e9 / self.end_ns

    @property
    def avg_queue(self) -> float:
        """Mean number of requests waiting, over time (Little: sum of waits over the span)."""
        return sum(self.wait_ns) / self.end_ns


def run_open_loop(
    requests: Sequence[Request], arrivals_ns: Sequence[int], max_num_seqs: int
) -> TimedRun:
    """Requests arrive at the given (ascending) times whatever the server does."""
    pending = deque(zip(arrivals_ns, requests, strict=True))
    return _run_timed(pending, max_num_seqs, lambda _now: None)


def run_closed_loop(requests: Sequence[Request], clients: int) -> TimedRun:
    """`clients` callers take requests from one list; each submits its next when one ends.

    All submit their first at time 0. There is a slot for every client, so `clients` is
    the concurrency.
    """
    backlog = deque(requests)
    pending = deque((0, backlog.popleft()) for _ in range(min(clients, len(requests))))

    def next_of_client(now: int) -> None:
        if backlog:
            pending.append((now, backlog.popleft()))

    return _run_timed(pending, clients, next_of_client)


def _run_timed(
    pending: deque[tuple[int, Request]], max_num_seqs: int, on_finish: Callable[[int], None]
) -> TimedRun:
    """The event loop: equal decode steps between two changes are one jump.

    `pending` ascends in time; `on_finish(now)` may append to it at `now`.
    """
    run = TimedRun()
    now = 0
    step = 0
    ends: list[int] = []
    while pending or ends:
        if not ends and pending[0][0] > now:
            now = pending[0][0]
        start, prefill = now, 0
        admitted: list[int] = []
        while pending and pending[0][0] <= start and len(ends) < max_num_seqs:
            arrival, request = pending.popleft()
            admitted.append(arrival)
            prefill += request.prompt_tokens * PREFILL_NS_PER_TOKEN
            heapq.heappush(ends, step + request.output_tokens)
            run.output_tokens += request.output_tokens
        now += prefill
        run.peak_running = max(run.peak_running, len(ends))
        for arrival in admitted:
            run.wait_ns.append(start - arrival)
            run.ttft_ns.append(now + DECODE_STEP_NS - arrival)
        steps = ends[0] - step
        if pending and len(ends) < max_num_seqs:
            until_arrival = math.ceil((pending[0][0] - now) / DECODE_STEP_NS)
            steps = max(1, min(steps, until_arrival))
        step += steps
        now += steps * DECODE_STEP_NS
        while ends and ends[0] == step:
            heapq.heappop(ends)
            on_finish(now)
    run.end_ns = now
    return run


@dataclass(frozen=True, slots=True)
class Concurrency:
    """The outcome of the search: 0 clients when not even one meets the target."""

    clients: int
    throughput_tps: float
    p99_ttft_ns: list[int]
    """By number of clients, from 1."""


def search_concurrency(
    requests: Sequence[Request],
    target_ttft_ns: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Concurrency:
    """The most closed-loop clients whose p99 TTFT is within the target.

    Every count up to the number of requests is run: p99 need not grow with the count, so
    a bisection could stop at the wrong one; more clients than requests change nothing.
    """
    best, best_tps = 0, 0.0
    p99s = []
    for clients in range(1, len(requests) + 1):
        run = run_closed_loop(requests, clients)
        p99s.append(percentile(run.ttft_ns, 99))
        if p99s[-1] <= target_ttft_ns:
            best, best_tps = clients, run.throughput_tps
        on_progress(clients, len(requests))
    return Concurrency(best, best_tps, p99s)
