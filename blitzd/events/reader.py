"""Reading a log, also while it is written.

A cursor is the one primitive: `read` gives the next records or nothing for now, so the
same code replays a closed log and follows a live one. Every byte is checked before it is
decoded. Records of an append come only when all of it is there.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from blitzd.events.codec import MAX_APPEND_BYTES, Chain, Fault, FrameDecoder, UnknownPayload
from blitzd.events.damage import Damage, judge, later_frames
from blitzd.events.disk import Disk, OsDisk, read_all
from blitzd.events.errors import LogCorrupt, LogError
from blitzd.events.record import Record
from blitzd.events.segment import (
    SegmentHeader,
    log_directory,
    read_header,
    segment_path,
    segment_seqs,
    walk,
)

READ_BYTES = 256 << 10
"""About 2,000 records: enough to hide the calls, few enough to stay in the cache."""


class LogReader:
    """Reads the log in `directory` (a state directory, or its log/). Takes no lock.

    `forensic`: damage is noted in `LogCursor.problems` and passed over instead of raised.
    """

    def __init__(
        self, directory: Path, *, disk: Disk | None = None, forensic: bool = False
    ) -> None:
        self._disk = disk or OsDisk()
        self._forensic = forensic
        self.directory = log_directory(directory)

    @property
    def first_seq(self) -> int:
        """The oldest record that retention has left; 1 for an empty log."""
        seqs = segment_seqs(self._disk, self.directory)
        return seqs[0] if seqs else 1

    def cursor(self, from_seq: int | None = None) -> "LogCursor":
        """Before record `from_seq`, or the oldest."""
        return LogCursor(self.directory, from_seq, self._disk, self._forensic)

    def batches(self, from_seq: int | None = None) -> Iterator[list[Record]]:
        """Everything that is there now, in lists: the fastest way through a log."""
        with self.cursor(from_seq) as cursor:
            while batch := cursor.read():
                yield batch

    def records(self, from_seq: int | None = None) -> Iterator[Record]:
        for batch in self.batches(from_seq):
            yield from batch

    def follow(
        self, from_seq: int | None = None, *, poll_s: float = 0.1, stop: Callable[[], bool]
    ) -> Iterator[list[Record]]:
        """As `batches`, then waits for more until `stop()`. Blocks: not for an event loop,
        which reads a cursor at its own times."""
        with self.cursor(from_seq) as cursor:
            while not stop():
                if batch := cursor.read():
                    yield batch
                else:
                    time.sleep(poll_s)


class LogCursor:
    """A place in a log that moves forward."""

    def __init__(self, directory: Path, from_seq: int | None, disk: Disk, forensic: bool) -> None:
        self._directory = directory
        self._disk = disk
        self._forensic = forensic
        self._decoder = FrameDecoder(forensic=forensic)
        self._from_seq = from_seq or 0
        self._fd = -1
        self._path = directory
        self._header: SegmentHeader | None = None
        self._offset = self._begin = 0
        self._chain = Chain(0, from_seq or 1)
        self._finished = False
        self.problems: list[LogCorrupt] = []
        self.unknown: Counter[int] = Counter()
        """Records given as UnknownPayload, by type id."""
        self.torn: Damage | None = None
        """After `read` gave nothing: an append at the end that is not, or not yet, whole."""

    @property
    def next_seq(self) -> int:
        return self._chain.next_seq

    @property
    def place(self) -> tuple[int, int]:
        """First sequence of the segment, and offset in it: how far the reading is."""
        return (self._header.first_seq if self._header else 0), self._offset

    def __enter__(self) -> "LogCursor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def read(self) -> list[Record]:
        """The next records, or an empty list at the end of what is there.

        Raises LogCorrupt (not when forensic), UnknownRecord, and LogError for a sequence
        that retention has removed.
        """
        self.torn = None
        while not self._finished and (self._fd >= 0 or self._seek()):
            records, fault, rest = self._take()
            if records:
                records = self._admit(records)
                if records:
                    return records
                continue
            following = self._following()
            if following and self._disk.size(self._fd) > self._offset + rest:
                continue  # written between the two looks
            if rest:
                moved = self._pass_damage(fault, following)
            elif following:
                moved = self._enter(following)
            else:
                moved = False
                self._reopen_if_empty()
            if not moved:
                break
        return []

    def _take(self) -> tuple[list[Record], Fault | None, int]:
        """Records from here on; a fault; how many bytes were seen behind them."""
        window = READ_BYTES
        while True:
            start = self._offset
            buffer = self._disk.pread(self._fd, window, start)
            records, taken = self._decoder.decode(buffer, 0, self._chain)
            self._offset, self._chain = start + taken.offset, taken.chain
            fault = taken.fault
            if fault is not None:
                fault = fault._replace(offset=start + fault.offset)
            elif not records and len(buffer) == window:
                if window <= 2 * MAX_APPEND_BYTES:
                    window *= 2
                    continue
                fault = Fault(start, self._chain, "an append that does not end")
            return records, fault, len(buffer) - taken.offset

    def _admit(self, records: list[Record]) -> list[Record]:
        if records[0].seq < self._from_seq:
            records = [record for record in records if record.seq >= self._from_seq]
        if self._decoder.has_unknown:
            for record in records:
                if type(record.payload) is UnknownPayload:
                    self.unknown[record.payload.unknown_type] += 1
        return records

    def _seek(self) -> bool:
        """Opens the segment that holds the first record wanted."""
        seqs = segment_seqs(self._disk, self._directory)
        if not seqs:
            return False
        wanted = self._from_seq or seqs[0]
        if wanted < seqs[0]:
            raise LogError(
                f"{self._directory}: record {wanted} is gone, the log begins at {seqs[0]}; "
                "start from a snapshot, or from there"
            )
        begun = sum(seq <= wanted for seq in seqs)
        if not self._enter(seqs[begun - 1 :]):
            return False
        if wanted > self.next_seq:
            stretch = walk(self._disk, self._fd, self._offset, self._chain, wanted)
            self._offset, self._chain = stretch.end, stretch.chain
        return True

    def _following(self) -> list[int]:
        assert self._header is not None
        here = self._header.first_seq
        return [seq for seq in segment_seqs(self._disk, self._directory) if seq > here]

    def _enter(self, candidates: list[int]) -> bool:
        """Begins the first of `candidates`; when forensic, the first with a header."""
        for first_seq in candidates:
            path = segment_path(self._directory, first_seq)
            fd = self._disk.open(path)
            try:
                header, begin = read_header(self._disk, fd, path)
            except ValueError as error:
                self._disk.close(fd)
                self._report(path, 0, str(error))
                continue
            except BaseException:
                self._disk.close(fd)
                raise
            try:
                self._check_link(path, header)
            except LogCorrupt:
                self._disk.close(fd)
                raise
            self.close()
            self._fd, self._path, self._header = fd, path, header
            self._offset = self._begin = begin
            self._chain = header.chain
            return True
        self._finished = self._finished or bool(candidates)
        return False

    def _check_link(self, path: Path, header: SegmentHeader) -> None:
        before = self._header
        if before is None:
            return
        if header.previous_first_seq != before.first_seq:
            name = segment_path(self._directory, header.previous_first_seq).name
            self._report(path, 0, f"the segment before it, {name}, is missing")
        elif header.chain != self._chain:
            self._report(
                self._path,
                self._offset,
                f"ends at record {self.next_seq - 1}, the next segment begins at "
                f"{header.first_seq} with checksum {header.previous_crc:#010x}, "
                f"here it is {self._chain.crc:#010x}",
            )

    def _report(self, path: Path, offset: int, reason: str) -> None:
        problem = LogCorrupt(path, offset, reason, self.next_seq, self.next_seq - 1)
        if not self._forensic:
            raise problem
        self.problems.append(problem)

    def _pass_damage(self, fault: Fault | None, following: list[int]) -> bool:
        """Whether there is something to read behind it."""
        tail = read_all(self._disk, self._fd, self._offset)
        last = not following
        damage = judge(self._path, tail, self._offset, self._chain, fault, last=last)
        if damage is None or damage.torn:
            self.torn = damage
            return False
        self._report(self._path, damage.offset, damage.reason)
        start = fault.offset - self._offset if fault else 0
        for later in later_frames(tail, start):
            if later.chain.next_seq >= self.next_seq:
                self._offset, self._chain = self._offset + later.offset, later.chain
                return True
        self._finished = last
        self._header = None  # the next cannot continue what is broken
        return self._enter(following)

    def _reopen_if_empty(self) -> None:
        """A segment without records is replaced when the next daemon starts."""
        if self._offset == self._begin:
            fd = self._disk.open(self._path)
            self._disk.close(self._fd)
            self._fd = fd
            self._header, self._begin = read_header(self._disk, fd, self._path)
            self._offset = self._begin
