"""Goodput: the highest Poisson rate at which enough requests meet their targets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blitzd.sim.cluster import (
    PREFILL_BATCH_TOKENS,
    Replica,
    attainment,
    run_colocated,
    run_decode,
    run_prefill,
)
from blitzd.sim.hardware import Link
from blitzd.sim.lane import Job, Policy
from blitzd.sim.workload import Workload

TOLERANCE = 0.02
"""Relative width at which the bisection stops."""
WARM_UP = 0.2
"""Leading share of a run that is not judged: it starts on an empty machine."""
MIN_SECONDS = 60
MAX_GROWTH = 4
"""A run lasts so many seconds, for a fast instance to be judged while it is full, but takes
at most this many times the requests asked for."""
RATE_LIMIT = 2000.0


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_s: float
    tpot_s: float
    attainment: float
    """Share of requests, in (0, 1]."""

    @property
    def ttft_ns(self) -> int:
        return round(self.ttft_s * 1e9)

    @property
    def tpot_ns(self) -> int:
        return round(self.tpot_s * 1e9)


def highest_rate(meets: Callable[[float], bool], guess: float) -> float:
    """The highest rate that `meets`, by doubling or halving from `guess` and bisection.

    0 when even guess / 256 does not. Takes `meets` to be monotone; where simulation noise
    makes it not so, a rate next to the border comes out.
    """
    low, high = guess, guess
    if meets(guess):
        while high < RATE_LIMIT and meets(high):
            low, high = high, 2 * high
    else:
        while not meets(low):
            low, high = low / 2, low
            if low < guess / 256:
                return 0.0
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if meets(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs deployments under one workload, seed and set of targets."""

    workload: Workload
    targets: Targets
    requests: int
    """In a run, at least."""
    seed: int

    def jobs(self, rate: float) -> list[Job]:
        count = min(max(self.requests, int(rate * MIN_SECONDS)), MAX_GROWTH * self.requests)
        return self.workload.jobs(count, rate, self.seed)

    def _enough(self, jobs: Sequence[Job], ttft_ns: int | None, tpot_ns: int | None) -> bool:
        return attainment(jobs, ttft_ns, tpot_ns, WARM_UP) >= self.targets.attainment

    def prefill(self, replica: Replica, guess: float) -> float:
        """Of one instance by itself: TTFT alone counts."""

        def meets(rate: float) -> bool:
            jobs = self.jobs(rate)
            run_prefill(jobs, replica, 1)
            for job in jobs:
                job.end_ns = job.first_ns
            return self._enough(jobs, self.targets.ttft_ns, None)

        return highest_rate(meets, guess)

    def decode(self, replica: Replica, guess: float) -> float:
        """Of one instance by itself, KV arriving with the requests: TPOT alone counts."""

        def meets(rate: float) -> bool:
            jobs = self.jobs(rate)
            for job in jobs:
                job.first_ns = job.end_ns = job.arrival_ns
            run_decode([(job.arrival_ns, job) for job in jobs if job.output_tokens > 1], replica, 1)
            return self._enough(jobs, None, self.targets.tpot_ns)

        return highest_rate(meets, guess)

    def disaggregated(
        self,
        prefill: tuple[Replica, int],
        decode: tuple[Replica, int],
        link: Link,
        kv_bytes_per_token: int,
        guess: float,
    ) -> float:
        """Of a whole deployment, hand-over included: both targets count."""

        def meets(rate: float) -> bool:
            jobs = self.jobs(rate)
            run_decode(run_prefill(jobs, *prefill, link, kv_bytes_per_token), *decode)
            return self._enough(jobs, self.targets.ttft_ns, self.targets.tpot_ns)

        return highest_rate(meets, guess)

    def colocated(
        self, replica: Replica, count: int, chunk_tokens: int | None, guess: float
    ) -> float:
        """Of `count` colocated instances: prefill first, or chunked with that budget."""
        policy = Policy.PREFILL_FIRST if chunk_tokens is None else Policy.CHUNKED

        def meets(rate: float) -> bool:
            jobs = self.jobs(rate)
            run_colocated(jobs, replica, count, policy, chunk_tokens or PREFILL_BATCH_TOKENS)
            return self._enough(jobs, self.targets.ttft_ns, self.targets.tpot_ns)

        return highest_rate(meets, guess)
