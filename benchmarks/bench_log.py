"""The event log beside SQLite in WAL mode and a bare write+fdatasync loop on the same disk.

    python benchmarks/bench_log.py [--events 1000000] [--directory DIR] [--json]

The records are those of the real core serving requests, so sizes and types are true ones.
Contenders take turns in short slices within one run: the ratios mean something on a busy
machine, the absolute figures only there and then. SQLite runs with synchronous=FULL, which
is what a commit that survives a power cut takes.
"""

import asyncio
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import cyclopts
import msgspec
import uvloop

from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.events import (
    LogReader,
    LogWriter,
    Record,
    Snapshot,
    latest_snapshot,
    types as ev,
    write_snapshot,
)
from blitzd.events.codec import Chain, encode_batch
from blitzd.fsm import ClusterState, fold
from blitzd.node.journal import FileJournal

SLICES = 40
SYNCED_OPS = 25
GROUP = 1000
"""What the promise of 10 ms makes of 100,000 events a second."""
GROUPS = 4
LIVES = 32
HASH_EVERY = 1000
SNAPSHOT_AT = 0.95


def core_records() -> Iterator[list[Record]]:
    """What the core decides, step by step, while it serves `LIVES` requests at a time."""
    core = Core(ClusterState())
    state = core.state
    now = 0

    def feed(payload: ev.Payload) -> list[Record]:
        nonlocal now
        now += 1_000_000
        step = core.step(payload, now, 1_764_435_600_000_000_000 + now)
        assert step.fault is None, step.fault
        return step.records

    roles = (("p0", "prefill"), ("d0", "decode"))
    yield feed(ev.Booted(1, "bench", "local", roles, Policy().pairs(), CORE_VERSION))
    for pid, (replica, _) in enumerate(roles, 1000):
        epoch = state.replicas[replica].epoch
        yield feed(ev.WorkerStarted(replica, epoch, pid))
        yield feed(ev.WorkerDescribed(replica, epoch, pid))
        yield feed(ev.LoadEnded(replica, epoch, "digest", "map", 30, 1000, 64, 4096))
    request_id = 0
    while True:
        ids = range(request_id + 1, request_id + LIVES + 1)
        request_id += LIVES
        for i in ids:
            yield feed(ev.RequestArrived(i, 100 + i % 400, 64, i * 7919, 0))
        for i in ids:
            request = state.requests[i]
            yield feed(ev.FirstTokenProduced(request.source, request.source_epoch, i))
        for i in ids:
            yield feed(ev.ImportEnded(state.requests[i].lease_id, 1_000_000, 10))
        for i in ids:
            request = state.requests[i]
            target, epoch = request.target, request.target_epoch
            yield feed(ev.GenerationEnded(target, epoch, i, "stop", 64, f"{i:064x}"))


def some_records(count: int) -> list[Record]:
    records: list[Record] = []
    steps = core_records()
    while len(records) < count:
        records += next(steps)
    return records[:count]


def frames_of(records: list[Record]) -> list[bytes]:
    chain, frames = Chain(0, records[0].seq), []
    for record in records:
        data, chain = encode_batch([record], chain, record.seq - 1)
        frames.append(data)
    return frames


class Bare:
    """The floor: the same bytes through write and fdatasync."""

    def __init__(self, directory: Path, records: list[Record]) -> None:
        self.fd = os.open(directory / "bare", os.O_RDWR | os.O_CREAT)
        self.frames = frames_of(records)

    def put(self, first: int, count: int) -> None:
        os.write(self.fd, b"".join(self.frames[first : first + count]))
        os.fdatasync(self.fd)


class Log:
    def __init__(self, directory: Path, records: list[Record]) -> None:
        self.writer = LogWriter.open(directory / "synced")
        self.records = records

    def put(self, first: int, count: int) -> None:
        self.writer.append(self.records[first : first + count])
        self.writer.sync()


class Sqlite:
    def __init__(self, directory: Path, records: list[Record]) -> None:
        self.db = sqlite3.connect(directory / "sqlite.db")
        self.db.execute("PRAGMA journal_mode=WAL")
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("CREATE TABLE log (seq INTEGER PRIMARY KEY, type INTEGER, payload BLOB)")
        encode = msgspec.msgpack.encode
        self.rows = [(r.seq, r.payload.type_id, encode(r.payload)) for r in records]

    def put(self, first: int, count: int) -> None:
        rows = self.rows[first : first + count]
        self.db.executemany("INSERT INTO log VALUES (?, ?, ?)", rows)
        self.db.commit()


class Journal:
    """The way of the node's driver: append on the event loop, sync in a thread."""

    def __init__(self, directory: Path, records: list[Record]) -> None:
        where = directory / "journal"
        self.journal = FileJournal(LogWriter.open(where), where)
        self.records = records
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def put_each(self, first: int, count: int) -> list[float]:
        return self.runner.run(self._put_each(first, count))

    async def _put_each(self, first: int, count: int) -> list[float]:
        took = []
        for i in range(first, first + count):
            begin = time.perf_counter()
            self.journal.append(self.records[i : i + 1])
            await self.journal.sync()
            took.append(time.perf_counter() - begin)
        return took


def timed_each(put: Callable[[int, int], None], first: int, count: int) -> list[float]:
    took = []
    for i in range(first, first + count):
        begin = time.perf_counter()
        put(i, 1)
        took.append(time.perf_counter() - begin)
    return took


def in_turn(contenders: Iterable[str], turn: int) -> list[str]:
    """Another one begins each time: who follows whom matters to a disk."""
    names = list(contenders)
    start = turn % len(names)
    return names[start:] + names[:start]


def bench_synced(directory: Path) -> dict[str, float]:
    """Median microseconds of one synced append, and ratios to the bare loop."""
    records = some_records(SLICES * SYNCED_OPS)
    bare, log = Bare(directory, records), Log(directory, records)
    sqlite, journal = Sqlite(directory, records), Journal(directory, records)
    contenders: dict[str, Callable[[int, int], list[float]]] = {
        "bare": partial(timed_each, bare.put),
        "log": partial(timed_each, log.put),
        "journal": journal.put_each,
        "sqlite": partial(timed_each, sqlite.put),
    }
    took: dict[str, list[float]] = {who: [] for who in contenders}
    for turn, first in enumerate(range(0, len(records), SYNCED_OPS)):
        for who in in_turn(contenders, turn):
            took[who] += contenders[who](first, SYNCED_OPS)
    found = {f"synced_{who}_us": statistics.median(t) * 1e6 for who, t in took.items()}
    for who in ("log", "journal", "sqlite"):
        found[f"synced_{who}_to_bare"] = found[f"synced_{who}_us"] / found["synced_bare_us"]
    return found


def bench_grouped(directory: Path) -> dict[str, float]:
    """Events a second in groups of GROUP, each group synced; median of the slices."""
    records = some_records(SLICES * GROUPS * GROUP)
    (directory / "grouped").mkdir()
    contenders = {
        "bare": Bare(directory / "grouped", records),
        "log": Log(directory / "grouped", records),
        "sqlite": Sqlite(directory / "grouped", records),
    }
    rates: dict[str, list[float]] = {who: [] for who in contenders}
    for turn, first in enumerate(range(0, len(records), GROUPS * GROUP)):
        for who in in_turn(contenders, turn):
            begin = time.perf_counter()
            for group in range(first, first + GROUPS * GROUP, GROUP):
                contenders[who].put(group, GROUP)
            rates[who].append(GROUPS * GROUP / (time.perf_counter() - begin))
    found = {f"grouped_{who}_per_s": statistics.median(r) for who, r in rates.items()}
    found["grouped_log_to_bare"] = found["grouped_log_per_s"] / found["grouped_bare_per_s"]
    found["grouped_log_to_sqlite"] = found["grouped_log_per_s"] / found["grouped_sqlite_per_s"]
    return found


def write_long(directory: Path, events: int) -> dict[str, float]:
    """A log of `events`, appended a step at a time and synced every 10,000; a snapshot near
    its end."""
    writer = LogWriter.open(directory)
    appending = 0.0
    synced = 0
    snapshot_at = int(events * SNAPSHOT_AT)
    for step in core_records():
        begin = time.perf_counter()
        writer.append(step)
        if writer.last_seq - synced >= 10_000:
            synced = writer.sync()
        appending += time.perf_counter() - begin
        if snapshot_at and writer.last_seq >= snapshot_at:
            seq = writer.sync()
            write_snapshot(directory, Snapshot(seq, "", bytes(1 << 20)))
            snapshot_at = 0
        if writer.last_seq >= events:
            break
    writer.close()
    size = sum(path.stat().st_size for path in directory.glob("*.log"))
    return {
        "append_per_s": writer.last_seq / appending,
        "bytes_per_event": size / writer.last_seq,
        "events": writer.last_seq,
    }


def bench_replay(directory: Path, rounds: int) -> dict[str, float]:
    """Events a second: read and decoded; folded as well, with a hash every HASH_EVERY."""
    read, folded, cpu = [], [], []
    for _ in range(rounds):
        begin, count = time.perf_counter(), 0
        for batch in LogReader(directory).batches():
            count += len(batch)
        read.append(count / (time.perf_counter() - begin))
        begin, state, cpu_begin = time.perf_counter(), ClusterState(), time.process_time()
        for batch in LogReader(directory).batches():
            for record in batch:
                fold(state, record)
                if record.seq % HASH_EVERY == 0:
                    state.hash()
        folded.append(count / (time.perf_counter() - begin))
        cpu.append(count / (time.process_time() - cpu_begin))
    return {
        "read_per_s": max(read),
        "replay_per_s": max(folded),
        "replay_per_cpu_s": max(cpu),
    }


def bench_memory(directory: Path, events: float) -> dict[str, float]:
    """Resident MiB after a tenth of a replay, and the most after that."""
    state, early, most, count = ClusterState(), 0.0, 0.0, 0
    for batch in LogReader(directory).batches():
        for record in batch:
            fold(state, record)
        count += len(batch)
        state.hash()
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        mib = resident * os.sysconf("SC_PAGE_SIZE") / 2**20
        if count < events / 10:
            early = max(early, mib)
        most = max(most, mib)
    return {"replay_mib_after_a_tenth": early, "replay_mib_most": most}


def bench_open(directory: Path) -> dict[str, float]:
    """Seconds until a daemon could go on: writer open, newest snapshot, the tail read. CPU
    seconds beside them tell what a busy machine adds."""
    begin, cpu = time.perf_counter(), time.process_time()
    writer = LogWriter.open(directory)
    snapshot = latest_snapshot(directory)
    assert snapshot is not None
    tail = sum(map(len, LogReader(directory).batches(snapshot.seq + 1)))
    found = {
        "open_s": time.perf_counter() - begin,
        "open_cpu_s": time.process_time() - cpu,
        "open_tail_events": tail,
    }
    writer.close()
    return found


def main(*, events: int = 1_000_000, directory: Path | None = None, json: bool = False) -> None:
    """Measure the log.

    Parameters
    ----------
    events
        Length of the log that is replayed and opened.
    directory
        Where to write (some 150 bytes an event); a temporary directory by default.
    json
        Print one JSON object.
    """
    scratch = Path(tempfile.mkdtemp(prefix="bench_log.", dir=directory))
    found: dict[str, float] = {}
    try:
        found |= bench_synced(scratch)
        found |= bench_grouped(scratch)
        found |= write_long(scratch / "long", events)
        found |= bench_open(scratch / "long")
        found |= bench_replay(scratch / "long", rounds=3 if events <= 1_000_000 else 1)
        found |= bench_memory(scratch / "long", found["events"])
    finally:
        shutil.rmtree(scratch)
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    for name, value in found.items():
        print(f"{name:<26} {value:>14,.2f}")


if __name__ == "__main__":
    cyclopts.run(main)
