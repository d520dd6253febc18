"""What serving during a load gains, on real workers: `python -m benchmarks.bench_zigzag`.

New, Old and the worker that New's weights come from are hosts of their own (network namespaces),
whose links let a layer by in six executions of one. This process plays the daemon: live, requests
go to New under BlitzScale's cap and Old follows it; stopping the world, Old serves alone until
the last layer is there. Layers are paced, so that two cores stand for two replicas. All policies
take turns in one run, on the same arrivals. `max_tokens` is 1: only prefill is timed. Then the
pair model runs on the run's own arrivals, layer times and layer arrivals (`--save` keeps them for
`blitzd sim zigzag --recorded`). An interrupt prints what there is. Control messages go by unix
sockets; weights and hidden states cross the links.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zigzag_load import Load, Seen
from benchmarks.zigzag_report import Busy, Sample, report, save, trial_of
from benchmarks.zigzag_world import LAYER_S, LAYERS, World, world
from blitzd.sched.zigzag import Policy
from blitzd.sim.arrivals import poisson_arrivals
from blitzd.sim.zigzag_drawing import as_text

RATE = 1.75
"""Arrivals in the time that one replica takes for one."""
POLICIES = (Policy.ILP_FREE, Policy.BEST_EFFORT, Policy.STOP_THE_WORLD)


def arrivals(load_s: float, seed: int) -> list[float]:
    times = [at / 1e9 for at in poisson_arrivals(1000, RATE / (LAYERS * LAYER_S), seed)]
    return [at for at in times if at < load_s]


class Bench:
    def __init__(self, policies: Sequence[Policy], loads: int, save_to: Path | None) -> None:
        self.seen: dict[Policy, list[Seen]] = {policy: [] for policy in policies}
        self.busy = Busy()
        self._loads = loads
        self._save_to = save_to
        self._next_id = 1

    async def run(self) -> None:
        async with world() as made:
            policies = list(self.seen)
            for policy in policies:
                await made.add(policy)
                # Memory, connections and code that every later load finds there.
                await self._one(made, policy, [0.0, 0.5])
            load_s = 0.98 * self._load_s
            for number in range(self._loads):
                turn = number % len(policies)
                for policy in policies[turn:] + policies[:turn]:
                    before = Sample.now(made.cpu_s)
                    found = await self._one(made, policy, arrivals(load_s, number))
                    self.busy.add(before, Sample.now(made.cpu_s))
                    self.seen[policy].append(found)
                    if self._save_to is not None:
                        save(self._save_to, policy, number, found)
                self._progress(number)

    async def _one(self, made: World, policy: Policy, times: list[float]) -> Seen:
        load = Load(made, policy, times, self._next_id)
        self._next_id += len(times)
        found = await load.run()
        self._load_s = found.loaded
        return found

    def _progress(self, number: int) -> None:
        means = [f"{policy} {self._mean_ms(found[-1]):.0f}" for policy, found in self.seen.items()]
        print(f"load {number + 1} of {self._loads}, mean TTFT ms: {', '.join(means)}", flush=True)

    @staticmethod
    def _mean_ms(found: Seen) -> float:
        return 1e3 * sum(found.ttft) / len(found.ttft)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loads", type=int, nargs="?", default=30)
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--ilp", action="store_true", help="this policy too")
    parser.add_argument("--draw", type=int, metavar="LOAD", help="draws this load's zigzag")
    asked = parser.parse_args()
    if asked.save is not None:
        asked.save.mkdir(parents=True, exist_ok=True)
    policies = (Policy.ILP_FREE, *([Policy.ILP] if asked.ilp else []), *POLICIES[1:])
    bench, began = Bench(policies, asked.loads, asked.save), time.monotonic()
    running = asyncio.create_task(bench.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await asyncio.wait([running])
    print(f"layers paced at {LAYER_S * 1e3:.0f} ms, {RATE} times one replica's rate of arrivals")
    print(*report(bench.seen), sep="\n")
    if bench.busy.wall_s:
        print(bench.busy)
    print(f"{time.monotonic() - began:.0f} s in all")
    if asked.draw is not None and 0 < asked.draw <= len(bench.seen[Policy.ILP_FREE]):
        found = bench.seen[Policy.ILP_FREE][asked.draw - 1]
        print(as_text(trial_of(found.recorded()).pair, found.outcome))
    if running.cancelled():
        return 130
    running.result()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
