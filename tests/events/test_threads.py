"""Appends on one thread while others sync: what a driver does."""

import threading
import time
from pathlib import Path

from log_samples import read, records

from blitzd.events import LogReader, LogWriter, OsDisk


class SlowSync(OsDisk):
    """A disk whose sync takes long enough to be in the way."""

    def fdatasync(self, fd: int) -> None:
        time.sleep(0.02)
        super().fdatasync(fd)


def test_a_running_sync_does_not_hold_up_appends(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path, disk=SlowSync())
    writer.append(records(1, 1))
    syncing = threading.Thread(target=writer.sync)
    syncing.start()
    time.sleep(0.005)
    begin = time.perf_counter()
    for _ in range(5):
        writer.append(records(writer.last_seq + 1, 1))
    took = time.perf_counter() - begin
    assert syncing.is_alive() or took < 0.02
    syncing.join(10)
    assert writer.durable_seq == 1, "a sync vouches only for what was there when it began"
    assert writer.sync() == 6
    writer.close()


def test_appends_syncs_rotations_and_a_reader_together(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path, segment_bytes=5_000)
    done = threading.Event()
    behind: list[str] = []

    def sync() -> None:
        while not done.is_set():
            accepted = writer.last_seq
            if writer.sync() < accepted:
                behind.append(f"sync returned before record {accepted} was on disk")

    def follow() -> None:
        expected = 1
        for batch in LogReader(tmp_path).follow(poll_s=0.001, stop=done.is_set):
            if [r.seq for r in batch] != list(range(expected, expected + len(batch))):
                behind.append(f"the reader met {batch[0].seq}, not {expected}")
            expected += len(batch)

    threads = [threading.Thread(target=target) for target in (sync, sync, follow)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(600):
            writer.append(records(writer.last_seq + 1, 5))
            if turn % 20 == 0:
                time.sleep(0.001)
    finally:
        done.set()
        for thread in threads:
            thread.join(20)
    writer.close()
    assert behind == []
    assert read(tmp_path) == records(1, 3000)
    assert len(list(tmp_path.glob("*.log"))) > 3
