"""A bounded set of chunk buffers that UCX reads from and writes to.

UCX never sees the caller's memory. So a transfer that was given up cannot be written late
into blocks that have a new owner, nor be sent out of them. It is also the cheaper way: 64 MiB
in pieces of 96 KiB cost 27 ms of a core on each side when gathered into chunks of 1 MiB, and
40 ms in messages of a piece each.
"""

from typing import Any, NamedTuple

import numpy as np

from blitzd.fabric.segments import Bytes, Cursor

_BATCH = 8
"""Slots allocated together: one large block, which the kernel backs with huge pages."""


class Slot(NamedTuple):
    bytes: Bytes
    array: Any
    """The binding's handle on all of `bytes`."""


class SlotPool:
    """At most `limit` slots of `slot_bytes`. Used by one thread."""

    def __init__(self, limit: int, slot_bytes: int, array: Any) -> None:
        self._limit = limit
        self._slot_bytes = slot_bytes
        self._array = array
        self._free: list[Slot] = []
        self._made = 0

    def take(self) -> Slot | None:
        """A free slot, or None: ask again when one was put back."""
        if not self._free and self._made < self._limit:
            count = min(_BATCH, self._limit - self._made)
            block = np.empty((count, self._slot_bytes), dtype=np.uint8)
            self._free = [Slot(row, self._array(row)) for row in block]
            self._made += count
        return self._free.pop() if self._free else None

    def put(self, slot: Slot) -> None:
        if self._made > self._limit:
            self._made -= 1
        else:
            self._free.append(slot)

    def extend(self, count: int) -> None:
        """Changes the limit: by so many more while as many are stuck with a silent peer."""
        self._limit += count


def gather(source: Bytes, cursor: Cursor, size: int, slot: Slot) -> None:
    """Copies the next `size` bytes under `cursor` to the start of `slot`."""
    at = 0
    for offset, length in cursor.take(size):
        slot.bytes[at : at + length] = source[offset : offset + length]
        at += length


def scatter(slot: Slot, target: Bytes, cursor: Cursor, size: int) -> None:
    """Copies the start of `slot` to the next `size` bytes under `cursor`."""
    at = 0
    for offset, length in cursor.take(size):
        target[offset : offset + length] = slot.bytes[at : at + length]
        at += length
