"""What a daemon does with its log on a good day."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings, strategies as st
from log_samples import Moved, fill, read, record, records, segments

from blitzd.events import (
    Identity,
    LogError,
    LogLocked,
    LogReader,
    LogUnavailable,
    LogWriter,
    OsDisk,
    RecordRefused,
)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    written = fill(tmp_path, [1, 5, 40])
    assert read(tmp_path) == written
    assert [r.seq for r in written] == list(range(1, 47))


def test_append_is_visible_to_others_before_sync(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    writer.append(records(1, 3))
    assert read(tmp_path) == records(1, 3)
    assert (writer.last_seq, writer.durable_seq) == (3, 0)
    assert writer.sync() == 3
    assert writer.durable_seq == 3
    writer.close()


def test_each_boot_continues_the_sequence_in_its_own_segment(tmp_path: Path) -> None:
    for boot in range(1, 4):
        writer = LogWriter.open(tmp_path, Identity("1.0", "digest", "node-a"))
        assert writer.boot_epoch == boot
        writer.append(records(writer.last_seq + 1, 10))
        writer.close()
    assert [p.name for p in segments(tmp_path)] == [
        "00000000000000000001.log",
        "00000000000000000011.log",
        "00000000000000000021.log",
    ]
    assert read(tmp_path) == records(1, 30)


def test_boots_without_records_leave_one_segment(tmp_path: Path) -> None:
    fill(tmp_path, [4])
    for _ in range(3):
        fill(tmp_path, [])
    assert len(segments(tmp_path)) == 2
    fill(tmp_path, [2])
    assert read(tmp_path) == records(1, 6)


def test_rotation_by_size(tmp_path: Path) -> None:
    written = fill(tmp_path, [10] * 20, segment_bytes=2000)
    assert len(segments(tmp_path)) > 5
    assert read(tmp_path) == written
    assert read(tmp_path, 77) == written[76:]
    assert read(tmp_path, 1) == written


def test_rotation_by_time(tmp_path: Path) -> None:
    written = fill(tmp_path, [1] * 10, segment_ns=30)  # a record's clock moves 10 ns
    assert [p.name[-6:-4] for p in segments(tmp_path)] == ["01", "05", "09"]
    assert read(tmp_path) == written


@given(
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    segment_bytes=st.integers(300, 5000),
)
@settings(max_examples=30, deadline=None)
def test_the_same_records_split_differently_read_equal(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], segment_bytes: int
) -> None:
    whole, split = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("split")
    fill(whole, [sum(cuts)])
    fill(split, cuts, segment_bytes=segment_bytes)
    assert read(whole) == read(split)
    middle = sum(cuts) // 2 + 1
    assert read(whole, middle) == read(split, middle)


def test_an_append_larger_than_the_read_window(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    batch = records(1, 400, size=10_000)
    writer.append(batch)
    writer.append(records(401, 5))
    writer.close()
    assert read(tmp_path) == batch + records(401, 5)
    LogWriter.open(tmp_path).close()


def test_following_a_live_log_over_rotation_and_restart(tmp_path: Path) -> None:
    seen = []
    with LogReader(tmp_path).cursor() as cursor:
        assert cursor.read() == []
        for _ in range(3):
            writer = LogWriter.open(tmp_path, Identity("1" * cursor.next_seq), segment_bytes=500)
            assert cursor.read() == []
            for _ in range(12):
                writer.append(records(writer.last_seq + 1, 3))
                seen += cursor.read()
                assert seen[-1].seq == writer.last_seq
                writer.sync()
            writer.close()
            LogWriter.open(tmp_path, Identity("a longer version")).close()
            assert cursor.read() == []
    assert seen == records(1, 108)


def test_a_segment_that_ends_between_two_looks_of_a_reader(tmp_path: Path) -> None:
    """The reader finds nothing more, then sees that a segment follows: it must look again."""

    class Racing(OsDisk):
        writer: LogWriter | None = None

        def names(self, directory: Path) -> list[str]:
            writer, self.writer = self.writer, None
            if writer is not None:
                writer.append(records(writer.last_seq + 1, 9))
                writer.sync()
                writer.append(records(writer.last_seq + 1, 1))
            return super().names(directory)

    disk = Racing()
    writer = LogWriter.open(tmp_path, segment_bytes=500)
    writer.append(records(1, 3))
    with LogReader(tmp_path, disk=disk).cursor() as cursor:
        assert cursor.read() == records(1, 3)
        disk.writer = writer
        assert cursor.read() == records(4, 9)
        assert cursor.read() == records(13, 1)
    writer.close()


def test_a_reader_may_start_ahead_of_the_log(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    with LogReader(tmp_path).cursor(5) as cursor:
        writer.append(records(1, 3))
        assert cursor.read() == []
        writer.append(records(4, 3))
        assert cursor.read() == records(5, 2)
    writer.close()


def test_a_state_directory_is_as_good_as_its_log(tmp_path: Path) -> None:
    fill(tmp_path / "log", [3])
    assert read(tmp_path) == read(tmp_path / "log") == records(1, 3)


def test_a_second_writer_is_refused_by_name_of_the_first(tmp_path: Path) -> None:
    first = LogWriter.open(tmp_path)
    with pytest.raises(LogLocked, match=f"process {os.getpid()}"):
        LogWriter.open(tmp_path)
    first.append(records(1, 1))
    first.close()
    LogWriter.open(tmp_path).close()


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(LogUnavailable, match="closed"):
        writer.append(records(1, 1))
    with pytest.raises(LogUnavailable, match="closed"):
        writer.sync()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seq": 5}, "seq 5, accepted: 4"),
        ({"seq": 3}, "seq 3, accepted: 4"),
        ({"cause": -1}, "cause is -1, accepted: an integer from 0"),
        ({"mono_ns": 1 << 64}, "mono_ns is"),
        ({"wall_ns": 1 << 63}, "wall_ns is"),
        ({"mono_ns": 29}, "never goes backwards"),
        ({"payload": Moved("x" * (1 << 20), 1)}, "accepted: up to 1048576"),
        ({"payload": Moved("a", 1 << 64)}, "record 4"),
        ({"payload": Moved("\ud800", 1)}, "record 4"),
    ],
)
def test_a_refused_record_takes_its_batch_with_it_and_changes_nothing(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    fill(tmp_path, [2])
    writer = LogWriter.open(tmp_path)
    writer.append([record(3)])
    bad = msgspec.structs.replace(record(4), **change)
    with pytest.raises(RecordRefused, match=says):
        writer.append([bad])
    with pytest.raises(RecordRefused):
        writer.append([bad, record(5)])
    writer.append(records(4, 2))
    writer.close()
    assert read(tmp_path) == records(1, 5)


def test_an_append_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    with pytest.raises(RecordRefused, match="accepted: up to"):
        writer.append(records(1, 100, size=200_000))
    writer.append(records(1, 1))
    writer.close()


def test_the_wall_clock_may_jump_backwards(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    jump = [msgspec.structs.replace(record(seq), wall_ns=10**18 - seq * 10**9) for seq in (1, 2, 3)]
    writer.append(jump)
    writer.close()
    before_the_epoch = msgspec.structs.replace(record(4), wall_ns=-5)
    writer = LogWriter.open(tmp_path, wall_ns=lambda: -7)
    writer.append([before_the_epoch])
    writer.close()
    assert read(tmp_path) == [*jump, before_the_epoch]


def test_the_monotonic_clock_begins_anew_with_a_boot(tmp_path: Path) -> None:
    fill(tmp_path, [3])
    writer = LogWriter.open(tmp_path)
    after = msgspec.structs.replace(record(4), mono_ns=0)
    writer.append([after])
    writer.close()
    assert read(tmp_path)[-1] == after


def test_status_shows_what_waits_for_the_disk(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path)
    writer.append(records(1, 4))
    status = writer.status()
    assert (status.state, status.last_seq, status.durable_seq) == ("open", 4, 0)
    assert status.unsynced_bytes > 4 * 52
    writer.sync()
    assert writer.status().unsynced_bytes == 0
    writer.close()


def test_a_file_that_is_no_segment_is_named(tmp_path: Path) -> None:
    fill(tmp_path, [3])
    (tmp_path / "00000000000000000001 (copy).log").write_bytes(b"")
    with pytest.raises(LogError, match=r"\(copy\).log: a segment's name is 20 digits"):
        LogWriter.open(tmp_path)
