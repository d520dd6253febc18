"""How large the pieces are in which a chain of replicas forwards weights."""

import math

from blitzd.control.multicast import Chain
from blitzd.control.topology import Topology

OVERHEAD_S = 200e-6
"""Of one message, beside its bytes: 140 to 370 us on a busy box of two cores."""
LEAST, MOST = 64 << 10, 1 << 20
"""Bytes. The transport takes no more: a message is one segment of it."""
STEP = 64 << 10


def chunk_bytes(size: int, hops: int, rate: int) -> int:
    """The best for `size` bytes down a chain of `hops` links of `rate` bytes a second.

    A chain forwards whole chunks, so with chunks of c bytes and o seconds for each

        T(c) = (size / c + hops - 1) (c / rate + o)

    until the last target has all: small ones cost o more often, large ones fill the chain
    later. T is least at c = sqrt(size rate o / (hops - 1)); one hop has nothing to fill.
    """
    if hops < 2:
        return MOST
    best = math.isqrt(round(size * rate * OVERHEAD_S) // (hops - 1))
    return min(MOST, max(LEAST, round(best / STEP) * STEP))


def chunk_of(topology: Topology, chain: Chain, size: int, hops_before: int) -> int:
    """For a chain that hangs onto `hops_before` others, at the rate of its slowest link."""
    path = (chain.source, *chain.targets)
    slowest = min(topology.rate(*hop) for hop in zip(path, chain.targets, strict=False))
    return chunk_bytes(size, hops_before + len(chain.targets), slowest)
