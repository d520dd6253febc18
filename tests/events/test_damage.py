"""Every way a log can be damaged ends in a valid start or in a refusal that says where."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from log_samples import (
    Sampled,
    UnsyncedDisk,
    fill,
    frames,
    raw_frame,
    read,
    record,
    records,
    segments,
)

from blitzd.events import (
    LogCorrupt,
    LogError,
    LogReader,
    LogWriter,
    Record,
    Snapshot,
    UnknownRecord,
    write_snapshot,
)
from blitzd.events.verify import verify


def restart(directory: Path, accept_loss: int | None = None) -> tuple[int, tuple[str, ...]]:
    """Opens, appends one record, closes: what a daemon's start does. (last good, cut files)"""
    writer = LogWriter.open(directory, disk=UnsyncedDisk(), accept_loss=accept_loss)
    last, recovered = writer.last_seq, writer.status().recovered
    writer.append([record(last + 1)])
    writer.close()
    return last, recovered


def test_truncation_at_every_byte_of_the_last_two_frames(tmp_path: Path) -> None:
    fill(tmp_path / "log", [5, 1, 1])
    (segment,) = segments(tmp_path / "log")
    data = segment.read_bytes()
    ends = [end for _, end in frames(segment)]
    starts_at = ends[4]
    for size in range(starts_at, len(data)):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        (copy / segment.name).write_bytes(data[:size])
        whole = sum(end <= size for end in ends)
        assert read(copy) == records(1, whole)
        last, recovered = restart(copy)
        assert last == whole
        kept = b"".join((copy / name).read_bytes() for name in recovered)
        assert kept == data[ends[whole - 1] : size]
        assert read(copy) == records(1, whole + 1)


@pytest.mark.parametrize("synced", [True, False], ids=["synced", "not synced"])
@pytest.mark.parametrize("victim", [4, 9], ids=["middle", "last"])
def test_a_flip_of_every_bit_of_one_frame(tmp_path: Path, synced: bool, victim: int) -> None:
    """Never a silent loss, not even of the last frame, and not when nothing behind it
    proves anything."""
    fill(tmp_path, [10] if not synced else [1] * 10)
    (segment,) = segments(tmp_path)
    data = segment.read_bytes()
    start, end = list(frames(segment))[victim]
    for bit in range(start * 8, end * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        segment.write_bytes(flipped)
        with pytest.raises(LogCorrupt) as refusal:
            LogWriter.open(tmp_path)
        lost = victim + 1 if synced else 1  # an append is all or nothing
        assert refusal.value.file == segment
        assert refusal.value.first_lost == lost
        assert str(start) in str(refusal.value)
        with pytest.raises(LogCorrupt):
            read(tmp_path)
        cursor = LogReader(tmp_path, forensic=True).cursor()
        survivors = [r for _ in range(10) for r in cursor.read()]
        cursor.close()
        assert [r for r in records(1, 10) if r.seq != victim + 1][:victim] == survivors[:victim]
        assert len(cursor.problems) == 1
        assert segment.read_bytes() == flipped


def test_what_is_behind_one_broken_frame_is_still_read_forensically(tmp_path: Path) -> None:
    fill(tmp_path, [1] * 10)
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    start, end = list(frames(segment))[4]
    data[end - 12] ^= 1
    segment.write_bytes(data)
    cursor = LogReader(tmp_path, forensic=True).cursor()
    survivors = [r.seq for _ in range(3) for r in cursor.read()]
    cursor.close()
    assert survivors == [1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert [p.offset for p in cursor.problems] == [start]


@pytest.mark.parametrize("zeros", [1, 7, 8, 56, 511, 512, 4096, 1_000_000])
def test_a_tail_of_zeros_is_a_torn_write(tmp_path: Path, zeros: int) -> None:
    fill(tmp_path, [3, 4])
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes() + bytes(zeros))
    assert read(tmp_path) == records(1, 7)
    last, recovered = restart(tmp_path)
    assert last == 7
    assert (tmp_path / recovered[0]).read_bytes() == bytes(zeros)


def test_sectors_that_never_reached_the_disk_are_a_torn_write(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    writer.append(records(1, 5))
    writer.sync()
    synced = writer.status().segment_bytes
    writer.append(records(6, 100))
    writer.close()
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    hole = (synced // 512 + 3) * 512
    data[hole : hole + 512] = bytes(512)
    segment.write_bytes(data)
    assert restart(tmp_path)[0] == 5  # the second append was one unit
    assert read(tmp_path) == records(1, 6)


def test_the_same_hole_in_records_that_were_synced_is_corruption(tmp_path: Path) -> None:
    fill(tmp_path, [1] * 100)
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[3 * 512 : 4 * 512] = bytes(512)
    segment.write_bytes(data)
    with pytest.raises(LogCorrupt, match=r"record \d+ proves that it was on disk"):
        LogWriter.open(tmp_path)


@pytest.mark.parametrize("shift", range(0, 32, 4))
def test_zeros_in_a_payload_are_not_a_sector_that_was_never_written(
    tmp_path: Path, shift: int
) -> None:
    zeros_everywhere = Sampled(1, "s" * shift + ("\0" * 16 + "x" * 16) * 60)
    writer = LogWriter.open(tmp_path)
    writer.append([Record(1, 0, 0, 0, zeros_everywhere)])
    writer.close()
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[-20] ^= 1
    segment.write_bytes(data)
    with pytest.raises(LogCorrupt, match="none of its sectors is zeros"):
        LogWriter.open(tmp_path)


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


@pytest.mark.parametrize(
    ("harm", "says", "first_lost"),
    [
        (lambda s: s[2].unlink(), "the segment before it, 0{18}21.log, is missing", 21),
        (lambda s: s[0].unlink(), "no snapshot covers the 10 records before", 1),
        (lambda s: shutil.copy(s[1], s[1].with_name(f"{99:020d}.log")), "begins at record 11", 51),
        (lambda s: shutil.copy(s[1], s[3]), "begins at record 11: a copy", 31),
        (lambda s: swap(s[1], s[2]), "a copy", 11),
        (lambda s: s[2].write_bytes(b""), "ends inside the segment header", 21),
        (lambda s: s[2].write_bytes(s[2].read_bytes()[:-40]), "a segment follows", 30),
        (lambda s: cut_frames(s[2], 3), "ends at record 27", 28),
        (lambda s: s[2].write_bytes(s[2].read_bytes() + bytes(64)), "a segment follows", 31),
    ],
    ids=[
        "missing",
        "first missing",
        "duplicate",
        "overwritten",
        "swapped",
        "empty",
        "short",
        "whole frames gone",
        "zeros in the middle",
    ],
)
def test_a_segment_that_does_not_belong(
    tmp_path: Path, harm: Callable[[list[Path]], object], says: str, first_lost: int
) -> None:
    for _ in range(5):
        fill(tmp_path, [1] * 10)
    harm(segments(tmp_path))
    with pytest.raises(LogCorrupt, match=says) as refusal:
        LogWriter.open(tmp_path)
    assert refusal.value.first_lost == first_lost
    assert refusal.value.last_good == first_lost - 1
    assert refusal.value.file.exists()
    with pytest.raises(LogError):
        read(tmp_path, 1)
    for wrong in (first_lost - 1, first_lost + 1):
        with pytest.raises(LogCorrupt):
            LogWriter.open(tmp_path, accept_loss=wrong)
    before = {p.name: p.read_bytes() for p in segments(tmp_path)}
    assert restart(tmp_path, accept_loss=first_lost)[0] == first_lost - 1
    assert read(tmp_path) == records(1, first_lost)
    for name, data in before.items():
        here = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else b""
        aside = b"".join(p.read_bytes() for p in tmp_path.glob(f"{name}.torn-*"))
        assert data in (here, aside, here + aside)


def cut_frames(segment: Path, count: int) -> None:
    start, _ = list(frames(segment))[-count]
    segment.write_bytes(segment.read_bytes()[:start])


def test_a_log_that_lost_what_a_snapshot_knows(tmp_path: Path) -> None:
    """A clean cut at a frame leaves no trace in the log; the snapshot is the witness."""
    fill(tmp_path, [1] * 10)
    write_snapshot(tmp_path, Snapshot(8, "hash", b"state"))
    (segment,) = segments(tmp_path)
    cut_frames(segment, 5)
    with pytest.raises(LogCorrupt, match="a snapshot says that record 8 was on disk") as refusal:
        LogWriter.open(tmp_path)
    assert refusal.value.first_lost == 9
    assert restart(tmp_path, accept_loss=9)[0] == 8
    assert read(tmp_path) == [record(9)]


def test_damage_before_the_newest_snapshot_does_not_stop_a_start(tmp_path: Path) -> None:
    for _ in range(3):
        fill(tmp_path, [1] * 10)
    write_snapshot(tmp_path, Snapshot(25, "hash", b"state"))
    segments(tmp_path)[1].unlink()
    assert restart(tmp_path)[0] == 30
    assert [r.seq for r in read(tmp_path, 26)] == list(range(26, 32))


def test_leftovers_of_an_interrupted_start_are_removed(tmp_path: Path) -> None:
    fill(tmp_path, [4])
    leftover = tmp_path / "00000000000000000005.log.tmp"
    leftover.write_bytes(b"half a header")
    assert restart(tmp_path)[0] == 4
    assert not leftover.exists()


def test_a_report_lists_every_damage_and_what_is_left(tmp_path: Path) -> None:
    for _ in range(4):
        fill(tmp_path, [1] * 10)
    first, second, third, _ = segments(tmp_path)
    for segment, frame in ((first, 2), (first, 6), (third, 9)):
        data = bytearray(segment.read_bytes())
        _, end = list(frames(segment))[frame]
        data[end - 12] ^= 0x40
        segment.write_bytes(data)
    second.unlink()
    report = verify(tmp_path)
    assert not report.ok
    assert report.records == 10 - 2 + 10 - 1 + 10
    assert (report.first_seq, report.last_seq) == (1, 40)
    found = [(Path(p.file).name.lstrip("0"), p.first_lost) for p in report.problems]
    assert found == [("1.log", 3), ("1.log", 7), ("21.log", 11), ("21.log", 30)]


def test_a_broken_header_hides_only_its_segment(tmp_path: Path) -> None:
    for _ in range(3):
        fill(tmp_path, [1] * 10)
    data = bytearray(segments(tmp_path)[1].read_bytes())
    data[30] ^= 1
    segments(tmp_path)[1].write_bytes(data)
    report = verify(tmp_path)
    assert report.records == 20
    assert "header's checksum" in report.problems[0].reason


def test_a_report_counts_what_this_version_must_know_and_does_not(tmp_path: Path) -> None:
    fill(tmp_path, [2])
    (segment,) = segments(tmp_path)
    crc = int.from_bytes(segment.read_bytes()[list(frames(segment))[-1][0] + 8 :][:4], "little")
    frame, _ = raw_frame(64_998, 1, [], seq=3, crc=crc)
    segment.write_bytes(segment.read_bytes() + frame)
    report = verify(tmp_path)
    assert not report.ok
    assert report.unknown == {"64998": 1}
    assert "record 3 must be understood" in report.problems[0].reason
    with pytest.raises(UnknownRecord, match="record 3 has type id 64998"):
        read(tmp_path)
