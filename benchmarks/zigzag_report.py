"""The figures of `bench_zigzag`."""

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.zigzag_load import Seen
from benchmarks.zigzag_world import LAYERS
from blitzd.sched.pair_model import Arrival, Pair
from blitzd.sched.zigzag import Policy, pending_cap
from blitzd.sim.stats import percentile
from blitzd.sim.zigzag import RecordedPair, Trial, embedding_share, run_trials

BASE = Policy.STOP_THE_WORLD
QUIET = 0.6
"""Share of the cores up to which pacing stands for replicas with cores of their own."""


def trial_of(found: RecordedPair) -> Trial:
    arrivals = tuple(Arrival(one.arrival_ns, one.layer_ns) for one in found.requests)
    return Trial(Pair(found.ready_ns, arrivals, cap=pending_cap), found.embedding_ns)


@dataclass
class Pooled:
    """All loads of one policy."""

    loads: list[Seen]

    def __post_init__(self) -> None:
        self.ttft_ns = [round(t * 1e9) for load in self.loads for t in load.ttft]
        self.completed = sum(load.completed for load in self.loads)
        self.trials = [trial_of(load.recorded()) for load in self.loads]

    @property
    def mean_ns(self) -> float:
        return statistics.mean(self.ttft_ns)

    @property
    def p99_ns(self) -> int:
        return percentile(self.ttft_ns, 99)


def quartiles(values: list[float]) -> str:
    if len(values) < 2:
        return "-"
    return " / ".join(f"{value:.2f}" for value in statistics.quantiles(values, method="inclusive"))


def report(seen: dict[Policy, list[Seen]]) -> list[str]:
    """Of as many loads as every policy has. Ratios are to stopping the world."""
    loads = min(map(len, seen.values()))
    if not loads:
        return ["no load was run to its end by every policy"]
    pooled = {policy: Pooled(found[:loads]) for policy, found in seen.items()}
    base = pooled[BASE]
    every = [load for one in pooled.values() for load in one.loads]
    came = statistics.median((load.loaded - load.ready[0]) / LAYERS for load in every)
    ran = statistics.median(s for load in every for s in load.layer_s.values())
    lines = [
        f"{loads} loads, {len(base.ttft_ns)} requests a policy; a layer arrived in "
        f"{came * 1e3:.0f} ms and ran in {ran * 1e3:.1f} ms: {came / ran:.2f} executions",
        "policy          mean TTFT  ratio  quartiles of loads  p99 TTFT  ratio   in loads  model's",
    ]
    for policy, one in pooled.items():
        ratios = [
            statistics.mean(mine.ttft) / statistics.mean(theirs.ttft)
            for mine, theirs in zip(one.loads, base.loads, strict=True)
        ]
        modelled = run_trials(one.trials, policy).completed
        lines.append(
            f"{policy:15} {one.mean_ns / 1e6:6.0f} ms  {one.mean_ns / base.mean_ns:.3f}"
            f"  {quartiles(ratios):19} {one.p99_ns / 1e6:6.0f} ms  {one.p99_ns / base.p99_ns:.3f}"
            f"   {one.completed:8}  {one.completed / modelled:.2f} of {modelled}"
        )
    return lines + gap(pooled[Policy.ILP_FREE])


def gap(live: Pooled) -> list[str]:
    """What is left above a New that has all layers at once."""
    modelled = run_trials(live.trials, Policy.ILP_FREE).mean_ns
    share = embedding_share(live.trials, modelled)
    left = live.mean_ns / 1e6 - (modelled / 1e6 - share["gap_ms"])
    return [
        f"above a New that has everything at once: {left:.0f} ms, {share['gap_ms']:.0f} in the "
        f"model; the embedding that arrives first is {share['embedding_ms']:.0f} of them "
        f"({share['embedding_ms'] / left:.0%}, in the model {share['share']:.0%})"
    ]


@dataclass
class Busy:
    """How busy the machine was, and with what."""

    cpu_s: float = 0.0
    machine_s: float = 0.0
    wall_s: float = 0.0
    loadavg: list[float] = field(default_factory=list)

    def add(self, before: "Sample", after: "Sample") -> None:
        self.cpu_s += after.cpu_s - before.cpu_s
        self.machine_s += after.machine_s - before.machine_s
        self.wall_s += after.at - before.at
        self.loadavg.append(os.getloadavg()[0])

    def __str__(self) -> str:
        cores = os.cpu_count() or 1
        mine, all_ = (s / (cores * self.wall_s) for s in (self.cpu_s, self.machine_s))
        late = f"; over {QUIET:.0%}, what waited for a core is in the figures" * (all_ > QUIET)
        return (
            f"CPU: {mine:.0%} of {cores} cores by this benchmark, {all_:.0%} by all that ran, load "
            f"average {statistics.median(self.loadavg):.1f}{late}"
        )


@dataclass(frozen=True)
class Sample:
    cpu_s: float
    """Of the benchmark's processes."""
    machine_s: float
    at: float

    @classmethod
    def now(cls, cpu_s: float) -> "Sample":
        fields = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
        idle = fields[3] + fields[4]
        return cls(cpu_s, (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), time.monotonic())


def save(directory: Path, policy: Policy, number: int, seen: Seen) -> None:
    """For `blitzd sim zigzag --recorded`."""
    path = directory / f"{policy}-{number:02}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(seen.recorded())))
