"""Segment lists: which bytes of a buffer take part in a transfer, and in which order.

A transfer moves the concatenation of the source's segments onto the concatenation of the
target's. The two lists may cut it differently; only their totals must agree.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from blitzd.fabric.errors import SegmentError

Segment: TypeAlias = tuple[int, int]
"""(offset, length) in bytes."""
Bytes: TypeAlias = npt.NDArray[np.uint8]


def as_bytes(buffer: object, *, writable: bool, name: str) -> Bytes:
    """A flat uint8 view of anything with the buffer protocol; no copy.

    Raises SegmentError when the buffer is not contiguous, or read-only where it is to be
    written.
    """
    try:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
    except TypeError as error:
        raise SegmentError(f"{name}: {error}; accepted: a contiguous buffer of bytes") from error
    if writable and view.readonly:
        raise SegmentError(f"{name}: is read-only; accepted: a writable buffer")
    return np.frombuffer(view, dtype=np.uint8)


def checked(segments: Sequence[Segment], size: int, name: str) -> list[Segment]:
    """`segments` without empty ones and with neighbours joined, if all lie in [0, size)."""
    joined: list[Segment] = []
    for index, (offset, length) in enumerate(segments):
        if offset < 0 or length < 0 or offset + length > size:
            raise SegmentError(
                f"{name}[{index}]: offset {offset}, length {length} is outside the buffer; "
                f"accepted: 0 <= offset, 0 <= length, offset + length <= {size}"
            )
        if length == 0:
            continue
        if joined and joined[-1][0] + joined[-1][1] == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    return joined


def refuse_overlap(segments: Sequence[Segment], name: str) -> None:
    """Raises SegmentError when two segments share a byte: a target written twice."""
    end = 0
    for offset, length in sorted(segments):
        if offset < end:
            raise SegmentError(
                f"{name}: byte {offset} is in two segments; accepted: disjoint segments"
            )
        end = offset + length


def total(segments: Sequence[Segment]) -> int:
    return sum(length for _, length in segments)


class Cursor:
    """Walks a segment list in pieces of any size."""

    __slots__ = ("_index", "_into", "_segments")

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self._index = 0
        self._into = 0

    def take(self, size: int) -> Iterator[Segment]:
        """The next `size` bytes, cut where the segments are cut."""
        while size > 0:
            offset, length = self._segments[self._index]
            step = min(size, length - self._into)
            yield offset + self._into, step
            size -= step
            self._into += step
            if self._into == length:
                self._index += 1
                self._into = 0


def pairs(
    source: Sequence[Segment], target: Sequence[Segment], chunk: int
) -> Iterator[tuple[int, int, int]]:
    """(source offset, target offset, length) in order, none longer than `chunk`.

    The totals of the two lists must be equal.
    """
    targets = Cursor(target)
    for source_offset, length in source:
        done = 0
        while done < length:
            size = min(chunk, length - done)
            for target_offset, step in targets.take(size):
                yield source_offset + done, target_offset, step
                done += step
