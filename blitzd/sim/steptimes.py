"""How long one iteration takes: from the roofline, or from measured coefficients.

A decode step of `batch` sequences that read `context` KV tokens in all takes
`base + slope * context` integer nanoseconds, (base, slope) given by the batch alone. So the
time of k equal steps, over which the context grows by `batch` a step, is an exact
polynomial in k, and the simulator may jump.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blitzd.sim.roofline import Roofline

Chunk = tuple[int, int]
"""(new tokens, tokens of the same prompt computed before)."""


class StepTimes(Protocol):
    """Times of whole forward passes, all pipeline stages, in ns."""

    def prefill_ns(self, lengths: Sequence[int]) -> int:
        """One pass over whole prompts."""

    def decode(self, batch: int) -> tuple[int, int]:
        """(ns a step, ns a context token) with `batch` >= 1 sequences."""

    def mixed_ns(self, chunks: Sequence[Chunk], batch: int, context: int) -> int:
        """One pass over prompt chunks and, in the same pass, `batch` decoding sequences."""


@dataclass(slots=True)
class RooflineSteps:
    """Step times of `blitzd.sim.roofline`."""

    roofline: Roofline
    _decode: dict[int, tuple[int, int]] = field(default_factory=dict)

    def prefill_ns(self, lengths: Sequence[int]) -> int:
        seconds = self.roofline.linear_s(sum(lengths))
        return round((seconds + sum(map(self.roofline.attention_prefill_s, lengths))) * 1e9)

    def decode(self, batch: int) -> tuple[int, int]:
        known = self._decode.get(batch)
        if known is None:
            base = round(self.roofline.linear_s(batch) * 1e9)
            # Whole ns: 49 for an 8B model on an H100, 15 for 70B on eight; at most 3 % off.
            known = base, round(self.roofline.attention_decode_s(1) * 1e9)
            self._decode[batch] = known
        return known

    def mixed_ns(self, chunks: Sequence[Chunk], batch: int, context: int) -> int:
        seconds = self.roofline.linear_s(batch + sum(new for new, _ in chunks))
        seconds += sum(self.roofline.attention_prefill_s(new, past) for new, past in chunks)
        return round(seconds * 1e9) + context * self.decode(max(batch, 1))[1]


@dataclass(frozen=True, slots=True)
class LinearSteps:
    """Fitted coefficients, in ns.

    prefill = p0 + p1 * sum(len) + p2 * sum(len^2); decode = d0 + d1 * context + d2 * batch,
    of `small` below `threshold` sequences and of `large` from it on (DistServe's form).
    """

    prefill: tuple[int, int, float]
    """p2 is far below 1 ns, so it alone is not an integer; each pass is rounded to one."""
    small: tuple[int, int, int]
    large: tuple[int, int, int]
    threshold: int

    def prefill_ns(self, lengths: Sequence[int]) -> int:
        fixed, linear, square = self.prefill
        return fixed + linear * sum(lengths) + round(square * sum(n * n for n in lengths))

    def decode(self, batch: int) -> tuple[int, int]:
        fixed, context, sequence = self.small if batch < self.threshold else self.large
        return fixed + sequence * batch, context

    def mixed_ns(self, chunks: Sequence[Chunk], batch: int, context: int) -> int:
        """The fixed costs of a pass are paid once: those of the prefill."""
        _, linear, square = self.prefill
        tokens = sum(new for new, _ in chunks)
        pairs = sum((past + new) ** 2 - past**2 for new, past in chunks)
        total = self.prefill[0] + linear * tokens + round(square * pairs)
        if batch:
            _, slope, sequence = self.small if batch < self.threshold else self.large
            total += slope * context + sequence * batch
        return total
