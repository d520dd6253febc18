"""Seeded arrival times."""

import random


def poisson_arrivals(count: int, rate_per_s: float, seed: int) -> list[int]:
    """`count` arrival times in ns, ascending, of a Poisson process.

    The same seed gives the same pattern at every rate, only faster or slower, so that two
    rates differ by the rate and not by luck.
    """
    rng = random.Random(seed)
    now = 0.0
    times = []
    for _ in range(count):
        now += rng.expovariate(1.0)
        times.append(round(now * 1e9 / rate_per_s))
    return times
