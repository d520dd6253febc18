"""Disks that fill up, break, and lose power."""

import errno
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from log_samples import read, record, records

from blitzd.events import (
    LogError,
    LogUnavailable,
    LogWriter,
    OsDisk,
    Snapshot,
    latest_snapshot,
    write_snapshot,
)
from blitzd.events.virtual_disk import VirtualDisk

DIRECTORY = Path("/log")
CHANGES = {"open", "pwrite", "truncate", "fdatasync", "fsync_directory", "rename", "remove"}


class FaultyDisk:
    """Fails the k-th operation that changes a disk, or all from then on. A write that
    fails leaves half of its bytes."""

    def __init__(self, inner: Any, at: int, code: int, *, lasting: bool = False) -> None:
        self.inner, self.at, self.code, self.lasting = inner, at, code, lasting
        self.count = 0
        self.failed: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in CHANGES:
            return method

        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not options.get("write"):
                return method(*args, **options)
            self.count += 1
            if self.count == self.at or (self.lasting and self.count > self.at):
                self.failed.append(name)
                if name == "pwrite":
                    fd, data, offset = args
                    method(fd, bytes(data[: len(data) // 2]), offset)
                raise OSError(self.code, os.strerror(self.code))
            return method(*args, **options)

        return call


class Run:
    """A writer's life: what it was told, until an error ends it."""

    def __init__(self) -> None:
        self.accepted = 0
        self.durable = 0
        self.error: Exception | None = None

    def live(self, disk: Any, directory: Path, appends: int = 12) -> "Run":
        try:
            writer = LogWriter.open(directory, disk=disk, segment_bytes=1500)
        except (OSError, LogError) as error:
            self.error = error
            return self
        try:
            for _ in range(appends):
                writer.append(records(writer.last_seq + 1, 3))
                self.accepted = writer.last_seq
                self.durable = writer.sync()
        except LogUnavailable as error:
            self.error = error
            self.durable = writer.durable_seq
            assert writer.status().state == error.state
            with pytest.raises(LogUnavailable):
                writer.append(records(writer.last_seq + 1, 1))
        writer.close()
        return self


def operations_of_a_run() -> int:
    disk = FaultyDisk(VirtualDisk(), 0, 0)
    run = Run().live(disk, DIRECTORY)
    assert run.error is None
    assert disk.count >= 40
    return disk.count


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_an_error_at_every_operation(code: int, lasting: bool) -> None:
    """No acknowledged record is lost, whether the process dies or the power goes."""
    for k in range(1, operations_of_a_run() + 1):
        for power_cut in (False, True):
            inner = VirtualDisk()
            disk = FaultyDisk(inner, k, code, lasting=lasting)
            run = Run().live(disk, DIRECTORY)
            assert disk.failed
            if power_cut:
                inner.power_cut(Random(k))
            writer = LogWriter.open(DIRECTORY, disk=inner)
            assert writer.last_seq >= (run.durable if power_cut else run.accepted)
            assert writer.last_seq % 3 == 0, "half of an append survived"
            last = writer.last_seq
            writer.append(records(last + 1, 3))
            writer.close()
            assert read(DIRECTORY, disk=inner) == records(1, last + 3)


def test_an_error_at_every_operation_of_the_recovery() -> None:
    def torn() -> VirtualDisk:
        disk = VirtualDisk()
        writer = LogWriter.open(DIRECTORY, disk=disk)
        writer.append(records(1, 3))
        writer.sync()
        writer.append(records(4, 30))
        disk.power_cut(Random(3))
        return disk

    clean = FaultyDisk(torn(), 0, 0)
    assert Run().live(clean, DIRECTORY, appends=0).error is None
    assert clean.count >= 12
    for k in range(1, clean.count + 1):
        for code in (errno.ENOSPC, errno.EIO):
            inner = torn()
            Run().live(FaultyDisk(inner, k, code), DIRECTORY, appends=0)
            writer = LogWriter.open(DIRECTORY, disk=inner)
            assert writer.last_seq == 3
            writer.append([record(4)])
            writer.close()
            assert read(DIRECTORY, disk=inner) == records(1, 4)


def test_a_full_disk_is_reported_and_the_log_goes_on_when_there_is_room() -> None:
    disk = VirtualDisk(capacity_bytes=20_000)
    writer = LogWriter.open(DIRECTORY, disk=disk)
    with pytest.raises(LogUnavailable, match="the log is full: writing /log: No space left"):
        while True:
            writer.append(records(writer.last_seq + 1, 10))
    last = writer.last_seq
    assert writer.sync() == last, "what was accepted can still be put on disk"
    assert not writer.try_resume()
    assert writer.status().state == "full"
    disk.capacity_bytes = 1 << 20
    assert writer.try_resume()
    writer.append(records(last + 1, 10))
    writer.close()
    assert read(DIRECTORY, disk=disk) == records(1, last + 10)


def test_a_short_write_on_a_full_disk_leaves_nothing_of_its_append() -> None:
    disk = VirtualDisk(capacity_bytes=3_000)
    writer = LogWriter.open(DIRECTORY, disk=disk)
    writer.append(records(1, 3))
    with pytest.raises(LogUnavailable):
        writer.append(records(4, 100))
    assert read(DIRECTORY, disk=disk) == records(1, 3)
    disk.capacity_bytes = None
    assert writer.try_resume()
    writer.append([record(4)])
    writer.close()
    assert read(DIRECTORY, disk=disk) == records(1, 4)


def test_a_start_on_a_full_disk_serves_what_is_there_and_waits() -> None:
    disk = VirtualDisk()
    writer = LogWriter.open(DIRECTORY, disk=disk)
    writer.append(records(1, 3))
    writer.sync()
    writer.append(records(4, 100))
    disk.power_cut(Random(5))
    disk.capacity_bytes = 0
    writer = LogWriter.open(DIRECTORY, disk=disk)
    assert (writer.status().state, writer.last_seq) == ("full", 3)
    assert read(DIRECTORY, disk=disk) == records(1, 3)
    assert not writer.try_resume()
    with pytest.raises(LogUnavailable, match="full"):
        writer.append([record(4)])
    disk.capacity_bytes = None
    assert writer.try_resume()
    writer.append([record(4)])
    writer.close()
    assert read(DIRECTORY, disk=disk) == records(1, 4)


def test_a_failed_sync_is_never_repeated() -> None:
    class Lying(VirtualDisk):
        syncs = 0

        def fdatasync(self, fd: int) -> None:
            self.syncs += 1
            if self.syncs == 3:
                raise OSError(errno.EIO, "Input/output error")

    disk = Lying()
    writer = LogWriter.open(DIRECTORY, disk=disk)
    writer.append(records(1, 1))
    durable = writer.sync()
    writer.append(records(2, 1))
    with pytest.raises(LogUnavailable, match="the log is broken: syncing"):
        writer.sync()
    for again in (writer.sync, writer.try_resume, lambda: writer.append(records(3, 1))):
        with pytest.raises(LogUnavailable, match="broken"):
            again()
    assert disk.syncs == 3
    assert writer.durable_seq == durable == 1
    writer.close()


def test_power_cuts_lose_nothing_that_was_acknowledged() -> None:
    """Random appends, syncs, rotations, restarts; the disk keeps any subset of sectors."""
    for seed in range(300):
        random = Random(seed)
        disk = VirtualDisk()
        durable = 0
        for _ in range(4):
            writer = LogWriter.open(DIRECTORY, disk=disk, segment_bytes=4000)
            assert writer.last_seq >= durable, f"seed={seed}"
            for _ in range(random.randint(0, 12)):
                writer.append(records(writer.last_seq + 1, random.randint(1, 25)))
                if random.random() < 0.4:
                    durable = writer.sync()
            disk.power_cut(random)
            survivors = read(DIRECTORY, disk=disk)
            assert survivors == records(1, len(survivors)), f"seed={seed}"
            assert len(survivors) >= durable, f"seed={seed}"


def test_what_a_killed_writer_left_is_put_on_disk_by_the_next() -> None:
    for seed in range(20):
        disk = VirtualDisk()
        killed = LogWriter.open(DIRECTORY, disk=disk)
        killed.append(records(1, 40))
        disk.forget_process()
        writer = LogWriter.open(DIRECTORY, disk=disk)
        assert writer.durable_seq == 40, "it vouches for them from now on"
        disk.power_cut(Random(seed))
        assert read(DIRECTORY, disk=disk) == records(1, 40)


def test_what_is_appended_while_a_segment_ends_is_on_disk_before_the_next_begins() -> None:
    class Busy(VirtualDisk):
        writer: LogWriter | None = None

        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            writer, self.writer = self.writer, None
            if writer is not None:
                writer.append(records(writer.last_seq + 1, 20))

    for seed in range(20):
        disk = Busy()
        writer = LogWriter.open(DIRECTORY, disk=disk, segment_bytes=500)
        writer.append(records(1, 10))
        disk.writer = writer
        assert writer.sync() == 30
        disk.power_cut(Random(seed))
        assert read(DIRECTORY, disk=disk) == records(1, 30)
        LogWriter.open(DIRECTORY, disk=disk).close()


def test_a_snapshot_that_was_written_survives_a_power_cut() -> None:
    for seed in range(20):
        disk = VirtualDisk()
        older, newer = (Snapshot(seq, "hash", bytes([seq]) * 3000) for seq in (3, 9))
        write_snapshot(DIRECTORY, older, disk)
        write_snapshot(DIRECTORY, newer, disk)
        disk.power_cut(Random(seed))
        assert latest_snapshot(DIRECTORY, disk=disk) == newer
        assert latest_snapshot(DIRECTORY, at_most=8, disk=disk) == older


def test_two_virtual_writers() -> None:
    disk = VirtualDisk()
    first = LogWriter.open(DIRECTORY, disk=disk)
    with pytest.raises(LogError, match="is being written by process"):
        LogWriter.open(DIRECTORY, disk=disk)
    first.close()
    LogWriter.open(DIRECTORY, disk=disk).close()


def test_unsynced_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blitzd.events.writer.UNSYNCED_BYTES_MAX", 10_000)
    writer = LogWriter.open(tmp_path, disk=OsDisk())
    for _ in range(200):
        writer.append(records(writer.last_seq + 1, 10))
        assert writer.status().unsynced_bytes < 12_000
    assert writer.durable_seq > 1900
    writer.close()
