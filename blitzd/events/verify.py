"""A whole log read with open eyes: everything that is wrong with it, in one report."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from blitzd.events.codec import UnknownPayload
from blitzd.events.disk import Disk, OsDisk
from blitzd.events.errors import LogCorrupt
from blitzd.events.reader import LogCursor, LogReader
from blitzd.events.record import Record
from blitzd.events.segment import segment_seqs, segment_sizes
from blitzd.events.snapshot import read_snapshot, snapshot_path, snapshot_seqs

PROBLEMS_MAX = 100
"""A log can be all damage; nobody reads more."""


class Problem(msgspec.Struct, frozen=True):
    reason: str
    file: str = ""
    offset: int = 0
    first_lost: int = 0
    """0: the records are all there, something else is wrong."""
    last_good: int = 0


class Report(msgspec.Struct):
    """What `blitzd log verify --json` prints."""

    ok: bool
    first_seq: int
    """0: the log holds no record."""
    last_seq: int
    records: int
    segments: int
    bytes: int
    hash: str | None
    """Of the state that the records fold to; None where nobody folded."""
    torn_bytes: int
    """An append that was cut short at the end. Not a problem: the next start cuts it off."""
    snapshots: list[int]
    unknown: dict[str, int]
    """Records of types that this version skips, by type id."""
    problems: list[Problem]


Consumer = Callable[[list[Record]], str | None]
"""Takes the next records; says what is wrong with them."""


def verify(
    directory: Path,
    consume: Consumer | None = None,
    progress: Callable[[LogCursor], None] = lambda _: None,
    disk: Disk | None = None,
) -> Report:
    """Reads everything in `directory` (a state directory or its log/), past any damage.

    `consume` gets all records up to the first problem. Raises OSError, and LogError for a
    log of another format."""
    disk = disk or OsDisk()
    reader = LogReader(directory, disk=disk, forensic=True)
    report = Report(True, 0, 0, 0, 0, 0, None, 0, [], {}, [])
    seqs = segment_seqs(disk, reader.directory)
    report.segments = len(seqs)
    report.bytes = sum(segment_sizes(disk, reader.directory).values())
    with reader.cursor() as cursor:
        while batch := cursor.read():
            _take(report, batch)
            if consume is not None and not report.problems and not cursor.problems:
                reason = consume(batch)
                if reason is not None:
                    report.problems.append(Problem(reason))
            progress(cursor)
        report.problems[:0] = map(_damage, cursor.problems)
        report.torn_bytes = cursor.torn.size - cursor.torn.offset if cursor.torn else 0
        report.unknown = {str(type_id): n for type_id, n in sorted(cursor.unknown.items())}
    _check_snapshots(report, disk, reader.directory, seqs)
    report.ok = not report.problems
    del report.problems[PROBLEMS_MAX:]
    return report


def _take(report: Report, batch: list[Record]) -> None:
    report.first_seq = report.first_seq or batch[0].seq
    report.last_seq = batch[-1].seq
    report.records += len(batch)
    for record in batch:
        payload = record.payload
        if type(payload) is UnknownPayload and payload.needed:
            report.problems.append(
                Problem(
                    f"record {record.seq} must be understood, and its type id "
                    f"{payload.unknown_type}, version {payload.unknown_version}, is unknown here"
                )
            )


def _damage(error: LogCorrupt) -> Problem:
    return Problem(error.reason, str(error.file), error.offset, error.first_lost, error.last_good)


def _check_snapshots(report: Report, disk: Disk, directory: Path, seqs: list[int]) -> None:
    for seq in snapshot_seqs(disk, directory):
        path = snapshot_path(directory, seq)
        try:
            read_snapshot(disk, path)
        except ValueError as error:
            report.problems.append(Problem(f"damaged snapshot: {error}", str(path)))
        else:
            report.snapshots.append(seq)
    newest = max(report.snapshots, default=0)
    if newest > max(report.last_seq, seqs[0] - 1 if seqs else 0):
        reason = f"a snapshot says that record {newest} was on disk, the log ends before it"
        lost = report.last_seq + 1
        report.problems.append(Problem(reason, str(directory), 0, lost, lost - 1))
    if seqs and seqs[0] > newest + 1:
        reason = f"the log begins at {seqs[0]}, and no snapshot covers what was before"
        report.problems.append(Problem(reason, str(directory), 0, newest + 1, newest))
