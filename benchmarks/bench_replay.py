"""Replaying a log: read, folded with its hashes checked, decided again, opened, and in what
memory.

    python benchmarks/bench_replay.py [--events 1000000] [--directory DIR] [--json]

The log is a legal life that the real core decides: eight replicas, prefill and decode apart
and together, some thirty requests under way, samples, clients that leave, transfers that find
no room, workers that die and load again, an operator who scales. Rates are for one CPU
second of this process, which says the same on a busy machine; wall time is printed beside it.
The last snapshot is as old as the daemon lets it become.
"""

import os
import random
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import cyclopts
import msgspec

from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.control.redecide import redecide
from blitzd.events import LogReader, LogWriter, Record, Snapshot, types as ev, write_snapshot
from blitzd.fsm import ClusterState, RequestState
from blitzd.fsm.replaying import replay
from blitzd.node.driver import SNAPSHOT_EVERY
from blitzd.node.journal import SEGMENT_BYTES
from blitzd.node.restore import restore

ROLES = ("prefill",) * 3 + ("decode",) * 3 + ("colocated", "spare")
UNDER_WAY = 30
BLOCKS = 1024
APPEND_RECORDS = 1000
UNSYNCED_BYTES = 1 << 20
ROUNDS = 3
WALL_NS = 1_764_435_600_000_000_000


class Life:
    """Feeds the core what a cluster would, and gives each turn's records."""

    def __init__(self) -> None:
        self.core = Core(ClusterState())
        self.random = random.Random(7)
        self.now = 0
        self.next_id = 1
        self.ready: deque[list[Record]] = deque()

    def turns(self) -> Iterator[list[Record]]:
        roles = tuple((f"r{i}", role) for i, role in enumerate(ROLES))
        self.feed(ev.Booted(1, "bench", "local", roles, Policy().pairs(), CORE_VERSION))
        while True:
            self.bring_up()
            for _ in range(400):
                self.serve()
                while self.ready:
                    yield self.ready.popleft()
            self.disturb()

    def feed(self, payload: ev.Payload) -> None:
        self.now += self.random.randrange(100_000, 2_000_000)
        step = self.core.step(payload, self.now, WALL_NS + self.now)
        assert step.fault is None, step.fault
        if step.records:
            self.ready.append(step.records)

    def bring_up(self) -> None:
        for replica in list(self.core.state.replicas.values()):
            on = (replica.id, replica.epoch)
            if replica.worker == "spawning":
                self.feed(ev.WorkerStarted(*on, 1000))
                self.feed(ev.WorkerDescribed(*on, 1000))
            if replica.state.startswith("Loading"):
                for layers in range(0, 30, 6):
                    self.feed(ev.LoadMoved(*on, layers, 30, layers * 10**6, 3 * 10**7))
                self.feed(ev.LoadEnded(*on, "digest", "map", 30, 3 * 10**7, 64, BLOCKS))

    def disturb(self) -> None:
        chance = self.random.random()
        if chance < 0.3:
            replica = self.random.choice(list(self.core.state.replicas.values()))
            self.feed(ev.WorkerExited(replica.id, replica.epoch, "killed by SIGKILL"))
            self.now += 60 * 10**9
            self.feed(ev.Ticked())
        elif chance < 0.5:
            self.feed(ev.ScaleRequested(self.random.randint(2, 4), self.random.randint(2, 3)))

    def serve(self) -> None:
        """Everyone under way moves on by one, and newcomers fill the places."""
        requests = self.core.state.requests
        for request in list(requests.values()):
            if request.id in requests:
                self.move_on(request.id)
        for _ in range(UNDER_WAY - len(requests)):
            tokens = self.random.choice((30, 200, 900))
            self.feed(ev.RequestArrived(self.next_id, tokens, 256, self.next_id * 7919, 0))
            self.next_id += 1
        for replica in list(self.core.state.replicas.values()):
            if replica.blocks_total and self.random.random() < 0.4:
                used = self.random.randrange(BLOCKS)
                self.feed(ev.OccupancyReported(replica.id, replica.epoch, used, used % 17))
        self.feed(ev.Ticked())

    def move_on(self, request_id: int) -> None:
        request = self.core.state.requests[request_id]
        chance = self.random.random()
        source = (request.source, request.source_epoch)
        target = (request.target, request.target_epoch)
        if chance < 0.01:
            self.feed(ev.ClientLeft(request_id))
        elif request.state is RequestState.PREFILLING:
            if chance < 0.02:
                self.feed(ev.RequestErrored(*source, request_id, "NaN in logits"))
            else:
                colocated = self.core.state.replicas[request.source].state == "Colocated"
                self.feed(ev.FirstTokenProduced(*source, request_id, int(not colocated)))
        elif request.lease_id:
            if chance < 0.1:
                self.feed(ev.ImportEnded(request.lease_id, 0, 0, "no_room", "no blocks"))
            else:
                self.feed(ev.ImportEnded(request.lease_id, 5_000_000, 2_000_000))
        elif request.state is RequestState.DECODING:
            digest = f"{request_id * 0x9E3779B97F4A7C15 % 2**64:016x}"
            self.feed(ev.GenerationEnded(*target, request_id, "stop", 64, digest))


def write_log(directory: Path, events: int) -> None:
    """The life's first `events` records, with one snapshot SNAPSHOT_EVERY before the end."""
    life = Life()
    writer = LogWriter.open(directory, segment_bytes=SEGMENT_BYTES)
    waiting: list[Record] = []
    snapshot_at = max(0, events - SNAPSHOT_EVERY)
    # A shadow of the core, since that one is ahead of what is on disk by what it has ready.
    shadow = ClusterState()
    for turn in life.turns():
        waiting += turn
        done = waiting[-1].seq >= events
        if len(waiting) < APPEND_RECORDS and not done:
            continue
        writer.append(waiting)
        if writer.status().unsynced_bytes > UNSYNCED_BYTES:
            writer.sync()  # segments change with syncs
        replay(shadow, waiting)
        if snapshot_at and shadow.seq >= snapshot_at:
            writer.sync()
            write_snapshot(directory, Snapshot(shadow.seq, shadow.hash(), shadow.encode()))
            snapshot_at = 0
        waiting = []
        if done:
            break
    writer.close()


def rates(directory: Path) -> dict[str, float]:
    """Records a CPU second, the best of ROUNDS, read and replayed in turns."""
    read, folded, wall = [], [], []
    for _ in range(ROUNDS):
        begin = time.process_time()
        count = sum(map(len, LogReader(directory).batches()))
        read.append(count / (time.process_time() - begin))
        begin, begin_wall, state = time.process_time(), time.perf_counter(), ClusterState()
        for batch in LogReader(directory).batches():
            replay(state, batch)
        folded.append(count / (time.process_time() - begin))
        wall.append(count / (time.perf_counter() - begin_wall))
    return {
        "events": count,
        "read_per_cpu_s": max(read),
        "replay_per_cpu_s": max(folded),
        "replay_per_wall_s": max(wall),
        "replay_to_read": max(folded) / max(read),
    }


def decided_again(directory: Path) -> dict[str, float]:
    """The first tenth, in whole turns: deciding is slower than folding by far."""
    records = LogReader(directory).records()
    begin = time.process_time()
    result = redecide(islice(records, 100_000))
    took = time.process_time() - begin
    # The cut may go through the last turn.
    assert result.difference is None or result.difference.seq > 100_000, result.difference
    return {"redecide_per_cpu_s": 100_000 / took}


def memory(directory: Path, events: int) -> dict[str, float]:
    """Resident MiB: the most in the first tenth of a replay, and in all of it."""
    total = sum(path.stat().st_size for path in directory.glob("*.log"))
    state, early, most = ClusterState(), 0.0, 0.0
    with LogReader(directory).cursor() as cursor:
        seen = 0
        while batch := cursor.read():
            replay(state, batch)
            seen += len(batch)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            most = max(most, pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
            if seen <= events / 10:
                early = most
    return {"rss_mib_early": early, "rss_mib_most": most, "bytes_per_event": total / seen}


def opened(directory: Path) -> dict[str, float]:
    """What a start waits for: the writer, which checks the tail, then the state."""
    begin = time.perf_counter()
    cpu = time.process_time()
    writer = LogWriter.open(directory)
    writer_s = time.perf_counter() - begin
    state = restore(directory)
    found = {
        "open_wall_s": time.perf_counter() - begin,
        "open_cpu_s": time.process_time() - cpu,
        "open_writer_wall_s": writer_s,
    }
    assert state.seq == writer.last_seq
    writer.close()
    return found


def main(*, events: int = 1_000_000, directory: Path | None = None, json: bool = False) -> None:
    """Measure replays.

    Parameters
    ----------
    events
        Length of the log.
    directory
        Where to write it (some 100 bytes an event); a temporary directory by default.
    json
        Print one JSON object.
    """
    scratch = Path(tempfile.mkdtemp(prefix="bench_replay.", dir=directory))
    try:
        write_log(scratch, events)
        found = opened(scratch) | memory(scratch, events) | rates(scratch) | decided_again(scratch)
    finally:
        shutil.rmtree(scratch)
    if json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    for name, value in found.items():
        print(f"{name:<20} {value:>14,.2f}")


if __name__ == "__main__":
    cyclopts.run(main)
