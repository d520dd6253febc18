"""What stands between a log on disk and a writer: inspect, then cut what was torn.

`inspect` only reads. It walks the chain from the newest snapshot on and gives either a
plan that loses nothing which was acknowledged, or LogCorrupt. `carry_out` does the plan;
whatever leaves the log stays beside it under a name that ends in `.torn-<time>`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blitzd.events.codec import Chain
from blitzd.events.damage import Damage, judge
from blitzd.events.disk import Disk, read_all, write_all
from blitzd.events.errors import LogCorrupt
from blitzd.events.segment import SegmentHeader, read_header, segment_path, segment_seqs, walk
from blitzd.events.snapshot import latest_snapshot


@dataclass(frozen=True, slots=True)
class Plan:
    """How a log is to be continued."""

    chain: Chain
    """Where it goes on."""
    boot_epoch: int
    """For the next segment."""
    last: SegmentHeader | None
    """Of the last segment kept; None: the log starts anew."""
    cut: Damage | None = None
    """The torn or given-up tail of that segment."""
    set_aside: tuple[Path, ...] = ()
    """Whole segments that the operator gave up."""

    @property
    def last_seq(self) -> int:
        return self.chain.next_seq - 1


@dataclass(slots=True)
class _Walk:
    """The log as far as it is good."""

    disk: Disk
    directory: Path
    seqs: list[int]
    known: int
    """The state up to here is in a snapshot, whatever happened to the records."""
    chain: Chain
    last: SegmentHeader | None = None
    end: int = 0

    def corrupt(self, path: Path, offset: int, reason: str) -> LogCorrupt:
        good = max(self.chain.next_seq - 1, self.known)
        return LogCorrupt(path, offset, reason, good + 1, good)

    def run(self) -> Damage | None:
        """Returns the torn tail. Raises LogCorrupt."""
        first = self.seqs[0]
        path = segment_path(self.directory, first)
        if first > self.known + 1:
            self.chain = Chain(0, self.known + 1)
            reason = f"the log begins here, and no snapshot covers the {first - 1} records before"
            raise self.corrupt(path, 0, reason)
        start = max(i for i, seq in enumerate(self.seqs) if seq <= self.known + 1)
        damage = None
        for i in range(start, len(self.seqs)):
            path = segment_path(self.directory, self.seqs[i])
            with _opened(self.disk, path) as fd:
                damage = self._segment(path, fd, last=i == len(self.seqs) - 1)
        if self.chain.next_seq <= self.known:
            reason = f"the log ends here, but a snapshot says that record {self.known} was on disk"
            raise self.corrupt(path, self.end, reason)
        return damage

    def _segment(self, path: Path, fd: int, *, last: bool) -> Damage | None:
        try:
            header, begin = read_header(self.disk, fd, path)
        except ValueError as error:
            raise self.corrupt(path, 0, str(error)) from error
        if self.last is not None:
            self._check_link(path, self.last, header)
        stretch = walk(self.disk, fd, begin, header.chain)
        self.chain, self.last, self.end = stretch.chain, header, stretch.end
        tail = read_all(self.disk, fd, stretch.end)
        damage = judge(path, tail, stretch.end, stretch.chain, stretch.fault, last=last)
        if damage is not None and not damage.torn:
            raise self.corrupt(path, damage.offset, damage.reason)
        return damage

    def _check_link(self, path: Path, before: SegmentHeader, header: SegmentHeader) -> None:
        if header.previous_first_seq != before.first_seq:
            reason = f"the segment before it, {header.previous_first_seq:020d}.log, is missing"
            raise self.corrupt(path, 0, reason)
        if header.chain != self.chain:
            raise self.corrupt(
                segment_path(self.directory, before.first_seq),
                self.end,
                f"ends at record {self.chain.next_seq - 1}, checksum {self.chain.crc:#010x}; the "
                f"next segment continues record {header.first_seq - 1}, checksum "
                f"{header.previous_crc:#010x}",
            )


def inspect(disk: Disk, directory: Path, accept_loss: int | None = None) -> Plan:
    """Raises LogCorrupt, unless `accept_loss` is exactly its `first_lost`."""
    snapshot = latest_snapshot(directory, disk=disk)
    known = snapshot.seq if snapshot else 0
    seqs = segment_seqs(disk, directory)
    walk = _Walk(disk, directory, seqs, known, Chain(0, seqs[0] if seqs else known + 1))
    if not seqs and not known:
        return Plan(walk.chain, 1, None)
    try:
        if not seqs:
            raise walk.corrupt(directory, 0, f"no segment, though there is a snapshot at {known}")
        cut = walk.run()
    except LogCorrupt as error:
        if accept_loss != error.first_lost:
            raise
        return _plan_of_loss(walk, error)
    assert walk.last is not None
    return Plan(walk.chain, walk.last.boot_epoch + 1, walk.last, cut)


def _plan_of_loss(walk: _Walk, error: LogCorrupt) -> Plan:
    """Keeps the records before `error.first_lost`, or only the snapshot when the damage is
    before it."""
    last = walk.last if walk.chain.next_seq > walk.known else None
    aside = [
        segment_path(walk.directory, seq)
        for seq in walk.seqs
        if last is None or seq > last.first_seq
    ]
    epoch = walk.last.boot_epoch + 1 if walk.last else 1
    if last is None:
        return Plan(Chain(0, error.first_lost), epoch, None, None, tuple(aside))
    path = segment_path(walk.directory, last.first_seq)
    with _opened(walk.disk, path) as fd:
        size = walk.disk.size(fd)
    damaged = size > walk.end
    cut = Damage(path, walk.end, size, walk.chain, error.reason, False) if damaged else None
    return Plan(walk.chain, epoch, last, cut, tuple(aside))


def carry_out(disk: Disk, directory: Path, plan: Plan, stamp: int) -> list[Path]:
    """Cuts and sets aside, durably, and may be repeated after an error. Returns the files
    that hold what left the log. `stamp` makes their names unique."""
    kept: list[Path] = []
    for path in plan.set_aside:
        aside = path.with_name(f"{path.name}.torn-{stamp}")
        with suppress(FileNotFoundError):
            disk.rename(path, aside)
        kept.append(aside)
    for name in disk.names(directory):
        if name.endswith(".tmp"):
            disk.remove(directory / name)
    if plan.last is not None:
        kept += _cut_last(disk, segment_path(directory, plan.last.first_seq), plan.cut, stamp)
    disk.fsync_directory(directory)
    return kept


def _cut_last(disk: Disk, path: Path, cut: Damage | None, stamp: int) -> list[Path]:
    with _opened(disk, path, write=True) as fd:
        if cut is None:
            disk.fdatasync(fd)  # what a killed writer left in the page cache
            return []
        aside = path.with_name(f"{path.name}.torn-{stamp}")
        tail = read_all(disk, fd, cut.offset)
        if tail:
            with _opened(disk, aside, write=True) as copy:
                write_all(disk, copy, tail, 0)
                disk.fdatasync(copy)
            disk.fsync_directory(path.parent)
            disk.truncate(fd, cut.offset)
        disk.fdatasync(fd)
        return [aside]


@contextmanager
def _opened(disk: Disk, path: Path, *, write: bool = False) -> Iterator[int]:
    fd = disk.open(path, write=write)
    try:
        yield fd
    finally:
        disk.close(fd)
