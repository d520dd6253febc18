"""Torn or corrupt: what an unreadable place in a log means.

A power cut or a kill tears only what was being written: the tail of the last segment, and
of that only what nobody was told is on disk. A tear leaves a file that ends early, or
512-byte sectors that still hold zeros. Whatever else does not read was whole once.

Two marks in the frames decide the hard cases. The length is written twice in one aligned
word, so that a changed length is not taken for a short file. And each frame says how far
the log was on disk when it was written: an intact frame behind the bad one that was
written after the bad one had been synced proves that this is no tear.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google_crc32c import extend

from blitzd.events.codec import (
    FRAME,
    HEADER_BYTES,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    UNCHECKED_BYTES,
    Chain,
    Fault,
)

SECTOR_BYTES = 512
_WORDS = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Damage:
    """Where the good part of a segment ends, and what is behind it."""

    file: Path
    offset: int
    """Behind the last complete append: what a repair cuts to."""
    size: int
    chain: Chain
    reason: str
    torn: bool
    """An interrupted write; False: corruption."""

    @property
    def first_lost(self) -> int:
        return self.chain.next_seq

    @property
    def last_good(self) -> int:
        return self.chain.next_seq - 1


@dataclass(frozen=True, slots=True)
class Later:
    """An intact frame behind a bad place, proven by the checksum of the one before it."""

    offset: int
    chain: Chain
    durable_seq: int
    """How far the log was on disk when the frame was written."""


def judge(
    path: Path, tail: bytes, cut: int, chain: Chain, fault: Fault | None, *, last: bool
) -> Damage | None:
    """What is wrong with `tail`, the bytes of a segment from offset `cut` on.

    `chain` is where the log stands at `cut`, `last` whether no segment follows. None:
    there is nothing behind the last append.
    """
    if not tail:
        return None
    torn, reason = _looks_torn(tail, cut, fault.offset - cut if fault else None)
    if fault is not None:
        reason = f"{fault.reason} (offset {fault.offset}, {reason})"
        bad = fault.offset - cut
        seq = fault.chain.next_seq
        for later in later_frames(tail, bad):
            if later.chain.next_seq > seq and later.durable_seq >= seq:
                torn = False
                reason += f"; record {later.chain.next_seq} proves that it was on disk"
                break
    if not last:
        torn = False
        reason += "; a segment follows"
    return Damage(path, cut, cut + len(tail), chain, reason, torn)


def _looks_torn(tail: bytes, base: int, bad: int | None) -> tuple[bool, str]:
    """`base`: offset of `tail` in its file; `bad`: where in `tail` the bad frame starts."""
    if bad is None:
        return True, "the file ends inside an append"
    length, guard = _WORDS.unpack_from(tail, bad)
    if length == guard == 0:
        stop = bad + 1
    elif length ^ guard == MAGIC and length <= MAX_PAYLOAD_BYTES:
        stop = bad + HEADER_BYTES + length
    else:
        return False, "and no zeros either"
    while bad < stop:
        end = ((base + bad) // SECTOR_BYTES + 1) * SECTOR_BYTES - base
        if not any(tail[bad:end]):
            return True, "a sector of it was never written"
        bad = end
    return False, "none of its sectors is zeros"


def later_frames(tail: bytes, start: int) -> Iterator[Later]:
    """Intact frames behind the one at `start`, which itself may be the broken one whose
    stored checksum proves the next."""
    size = len(tail) - len(tail) % 8
    words = _WORDS.iter_unpack(memoryview(tail)[start:size])
    guards = (
        position
        for position, (length, guard) in zip(range(start, size, 8), words, strict=True)
        if length ^ guard == MAGIC and length <= MAX_PAYLOAD_BYTES
    )
    for position in guards:
        before = _frame_at(tail, position)
        if before is None:
            continue
        following, stored, _, _ = before
        frame = _frame_at(tail, following)
        if frame is None:
            continue
        end, checksum, seq, lag = frame
        if extend(stored, tail[following + UNCHECKED_BYTES : end]) == checksum:
            yield Later(following, Chain(stored, seq), seq - lag)


def _frame_at(tail: bytes, position: int) -> tuple[int, int, int, int] | None:
    """(end, checksum, sequence, lag) when a frame of plausible length is there."""
    if position + HEADER_BYTES > len(tail):
        return None
    length, guard, stored, _, seq, _, _, _, lag = FRAME.unpack_from(tail, position)
    end = position + HEADER_BYTES + length + 7 & -8
    if length ^ guard != MAGIC or length > MAX_PAYLOAD_BYTES or end > len(tail):
        return None
    return end, stored, seq, lag
