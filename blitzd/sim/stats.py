"""Percentiles that are observations."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[int], percent: float) -> int:
    """Nearest rank: the smallest observed value that `percent` of all do not exceed.

    Interpolation would let a p99 of 100 requests meet a target that two of them miss.
    0 for an empty sequence.
    """
    if not values:
        return 0
    rank = max(1, math.ceil(len(values) * percent / 100))
    return sorted(values)[rank - 1]
