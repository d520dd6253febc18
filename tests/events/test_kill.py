"""A writer process killed at random moments, a thousand times."""

import mmap
import os
import signal
import struct
import time
from pathlib import Path
from random import Random

import pytest
from log_samples import records

from blitzd.events import LogReader, LogWriter, Snapshot, apply_retention, write_snapshot

ACKNOWLEDGED = struct.Struct("<Q")


def write_until_killed(directory: Path, shared: mmap.mmap, seed: int) -> None:
    """Appends of any size; each is acknowledged through memory that survives this process."""
    random = Random(seed)
    writer = LogWriter.open(directory, segment_bytes=300_000)
    while True:
        size = random.choice((0, 0, 0, 5_000, 60_000))
        writer.append(records(writer.last_seq + 1, random.randint(1, 20), size))
        ACKNOWLEDGED.pack_into(shared, 0, writer.last_seq)
        if random.random() < 0.2:
            writer.sync()


def wait_for_more(shared: mmap.mmap, than: int) -> None:
    deadline = time.monotonic() + 10
    while ACKNOWLEDGED.unpack_from(shared)[0] <= than:
        assert time.monotonic() < deadline, "the writer acknowledged nothing in 10 s"
        time.sleep(0.0005)


def kill_writers(directory: Path, kills: int, seed: int) -> int:
    """Returns how many of the deaths tore the log."""
    random = Random(seed)
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    checked = torn = acknowledged = 0
    for kill in range(kills):
        child = os.fork()
        if child == 0:
            try:
                write_until_killed(directory, shared, seed + kill)
            finally:
                os._exit(1)
        if random.random() < 0.9:  # the others die while they open
            wait_for_more(shared, acknowledged)
        time.sleep(random.random() * 0.003)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"seed={seed} kill={kill}: the writer failed by itself"
        (acknowledged,) = ACKNOWLEDGED.unpack_from(shared)
        with LogReader(directory).cursor(checked + 1) as cursor:
            while batch := cursor.read():
                assert [r.seq for r in batch] == list(
                    range(checked + 1, checked + 1 + len(batch))
                ), f"seed={seed} kill={kill}"
                checked += len(batch)
            torn += cursor.torn is not None
        assert checked >= acknowledged, f"seed={seed} kill={kill}"
        if kill % 10 == 9:
            write_snapshot(directory, Snapshot(checked, "", b""))
            apply_retention(directory)
    return torn


def test_a_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    kill_writers(tmp_path, 100, seed=1)
    writer = LogWriter.open(tmp_path)
    assert writer.last_seq > 100
    writer.close()


@pytest.mark.slow
def test_a_thousand_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    torn = kill_writers(tmp_path, 1000, seed=1000)
    assert torn > 0, "no kill hit a write: the test proves nothing about torn tails"
