"""What the planner and a step of the core cost, by the number of replicas.

    python benchmarks/bench_planner.py [--replicas 100 1000 10000]

Each figure is the median of several; those of all sizes are taken in turns. CPU time of one
thread. A step is what the daemon pays for one input, whatever came of it. Of a pass that scales
up, which is the planner, the ladder and the plan of the multicast together, it is the least of
three.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from blitzd.control.core import Core
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm.table import LOADING
from tests.control.large_cluster import MS, large

ROUNDS = 15
BURSTS = 3


class Burst(NamedTuple):
    ms: float
    raised: int
    fed: int


class Timed:
    def __init__(self, replicas: int, described: bool = False) -> None:
        share = replicas * 2 // 5
        self.replicas = replicas
        # Weights move from replica to replica, so that each load has its place in a plan.
        self.core: Core = large(
            share,
            share,
            replicas - 2 * share,
            described=described,
            scale_down_window_ms=86_400_000,
            ladder_map=0,
        )
        self.now = 0
        self.request = 0
        self.took: dict[str, list[float]] = {}
        self.step(ev.Ticked(), "")

    def step(self, payload: Payload, what: str) -> int:
        """Returns how many records came of it."""
        self.now += 300 * MS
        start = time.process_time()
        step = self.core.step(payload, self.now, 0)
        took = time.process_time() - start
        assert step.fault is None, step.fault
        if what:
            self.took.setdefault(what, []).append(took * 1000)
        return len(step.records)

    def round(self) -> None:
        self.request += 1
        self.step(ev.Ticked(), "pass, nothing changed")
        self.step(ev.OccupancyReported("r0", 1, self.request, 1), "occupancy of one replica")
        arrived = ev.RequestArrived(self.request, 100, 64, 0, 0)
        self.step(arrived, "request: arrives and is granted")
        request = self.core.state.requests[self.request]
        first = ev.FirstTokenProduced(request.source, request.source_epoch, request.id)
        self.step(first, "request: KV goes to a decode")
        self.step(ev.ImportEnded(request.lease_id, 1000, 10), "request: KV is there")
        ended = ev.GenerationEnded(request.target, request.target_epoch, request.id, "stop", 5, "")
        self.step(ended, "request: ends")

    def burst(self) -> Burst:
        """A pass that raises an eighth of all, and finds weights for each."""
        state = self.core.state
        before = state.index.roles["spare"]
        wanted = len(state.index.takers) + self.replicas // 8
        requests = 0
        while state.index.tokens.total() < wanted * 600:
            requests += 1
            self.now += 1
            arrived = ev.RequestArrived(10**6 + requests, 10_000, 64, 0, 0)
            self.core.step(arrived, self.now, 0)
        self.step(ev.Ticked(), "burst")
        fed = sum(state.feeder(replica) is not None for replica in state.in_states(*LOADING))
        return Burst(self.took["burst"][-1], before - state.index.roles["spare"], fed)


def least_burst(size: int, described: bool) -> Burst:
    """Of several, each on a cluster of its own."""
    return min(Timed(size, described).burst() for _ in range(BURSTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[100, 1000, 10_000])
    sizes = parser.parse_args().replicas
    timed = [Timed(replicas) for replicas in sizes]
    for _ in range(ROUNDS):
        for one in timed:
            one.round()
    print(f"{'ms of CPU':<36}" + "".join(f"{size:>12,}" for size in sizes))
    for what in timed[0].took:
        row = [median(one.took[what]) for one in timed]
        print(f"{what:<36}" + "".join(f"{ms:>12.3f}" for ms in row))
    for how, described in (("chains", False), ("shards over 8 links", True)):
        rows = [least_burst(size, described) for size in sizes]
        print(f"{f'pass that scales up, {how}':<36}" + "".join(f"{r.ms:>12.3f}" for r in rows))
        print(f"{'  by so many replicas':<36}" + "".join(f"{r.raised:>12,}" for r in rows))
        print(f"{'  of them from replicas':<36}" + "".join(f"{r.fed:>12,}" for r in rows))


if __name__ == "__main__":
    main()
