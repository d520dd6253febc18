"""Snapshots and what retention may take away."""

from pathlib import Path

import pytest
from log_samples import fill, read, record, records, segments

from blitzd.events import (
    LogError,
    LogWriter,
    Snapshot,
    apply_retention,
    latest_snapshot,
    write_snapshot,
)
from blitzd.events.snapshot import snapshot_path


def snapshot(seq: int) -> Snapshot:
    return Snapshot(seq, f"hash-{seq}", b"state" * seq)


def test_the_newest_is_found(tmp_path: Path) -> None:
    assert latest_snapshot(tmp_path) is None
    for seq in (5, 20, 10):
        write_snapshot(tmp_path, snapshot(seq))
    assert latest_snapshot(tmp_path) == snapshot(20)
    assert latest_snapshot(tmp_path, at_most=19) == snapshot(10)
    assert latest_snapshot(tmp_path, at_most=4) is None


def test_an_empty_state_is_a_state(tmp_path: Path) -> None:
    write_snapshot(tmp_path, Snapshot(3, "", b""))
    assert latest_snapshot(tmp_path) == Snapshot(3, "", b"")


def test_one_damaged_anywhere_is_passed_over(tmp_path: Path) -> None:
    write_snapshot(tmp_path, snapshot(5))
    write_snapshot(tmp_path, snapshot(9))
    path = snapshot_path(tmp_path, 9)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        assert latest_snapshot(tmp_path) == snapshot(5), position
        path.write_bytes(data[:position])
        assert latest_snapshot(tmp_path) == snapshot(5), position
    path.write_bytes(data)
    path.rename(snapshot_path(tmp_path, 7))
    assert latest_snapshot(tmp_path) == snapshot(5), "a copy under another name"


def test_retention_keeps_two_snapshots_and_what_they_need(tmp_path: Path) -> None:
    for _ in range(6):
        fill(tmp_path, [10])
    for seq in (12, 30, 45):
        write_snapshot(tmp_path, snapshot(seq))
    gone = apply_retention(tmp_path)
    assert {path.name.lstrip("0") for path in gone} == {"12.snap", "1.log", "11.log", "21.log"}
    assert segments(tmp_path)[0].name.endswith("31.log"), "record 31 follows snapshot 30"
    assert read(tmp_path) == records(31, 30)
    assert read(tmp_path, 31) == records(31, 30)
    with pytest.raises(LogError, match="record 30 is gone, the log begins at 31"):
        read(tmp_path, 30)
    writer = LogWriter.open(tmp_path)
    writer.append([record(61)])
    writer.close()
    assert apply_retention(tmp_path) == []


@pytest.mark.parametrize(("oldest", "first_kept"), [(29, 21), (30, 31), (31, 31)])
def test_retention_keeps_the_record_after_the_snapshot(
    tmp_path: Path, oldest: int, first_kept: int
) -> None:
    for _ in range(5):
        fill(tmp_path, [10])
    for seq in (oldest, 45):
        write_snapshot(tmp_path, snapshot(seq))
    apply_retention(tmp_path)
    assert read(tmp_path)[0].seq == first_kept
    LogWriter.open(tmp_path).close()


def test_retention_counts_only_valid_snapshots(tmp_path: Path) -> None:
    for _ in range(3):
        fill(tmp_path, [10])
    for seq in (10, 20, 25):
        write_snapshot(tmp_path, snapshot(seq))
    snapshot_path(tmp_path, 25).write_bytes(b"damaged")
    apply_retention(tmp_path)
    assert latest_snapshot(tmp_path, at_most=19) == snapshot(10)
    assert read(tmp_path)[0].seq == 11


def test_retention_takes_nothing_before_there_are_two(tmp_path: Path) -> None:
    for _ in range(3):
        fill(tmp_path, [10])
    write_snapshot(tmp_path, snapshot(30))
    assert apply_retention(tmp_path) == []
    with pytest.raises(ValueError, match="accepted: 2 or more"):
        apply_retention(tmp_path, keep=1)


def test_retention_never_takes_the_segment_being_written(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    writer.append(records(1, 10))
    writer.sync()
    for seq in (9, 10):
        write_snapshot(tmp_path, snapshot(seq))
    apply_retention(tmp_path)
    writer.append([record(11)])
    writer.close()
    assert read(tmp_path) == records(1, 11)
