"""`blitzd sim zigzag`: one live pair under every policy, on given or drawn arrivals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from blitzd.sched.pair_model import Arrival, Outcome, Pair, simulate
from blitzd.sched.zigzag import Policy, pending_cap
from blitzd.sched.zigzag_targets import planner_for
from blitzd.sim.arrivals import poisson_arrivals
from blitzd.sim.errors import InputError
from blitzd.sim.report import Table, sealed
from blitzd.sim.stats import percentile

HELP = """\
Time 0 is the beginning of the load. Figures are TTFT of requests that arrive before its end, of all
trials together; in_load counts prefills that end before it does; stall_ms is what Old spent waiting
while a request was there.

Policies: ilp_free (BlitzScale's queues), ilp (its integer programme, where a plan holds in the
model; ilp_free else), best_effort (the layers that are there, once), stop_the_world.

A recorded load is a JSON file:
  {"pair": 1, "ready_ns": [when New had each layer, embedding included], "embedding_ns": 0,
   "old_free_ns": 0, "requests": [{"arrival_ns": 0, "layer_ns": 1000000}, ...]}
embedding_ns is the part of the load before layer 0 began to arrive."""


class RecordedRequest(msgspec.Struct, forbid_unknown_fields=True):
    arrival_ns: int
    layer_ns: int


class RecordedPair(msgspec.Struct, forbid_unknown_fields=True):
    pair: int
    ready_ns: tuple[int, ...]
    requests: list[RecordedRequest]
    embedding_ns: int = 0
    old_free_ns: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """One load, and how long its embedding took to arrive."""

    pair: Pair
    embedding_ns: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Drawn loads: `load` is the time that a layer takes to arrive in executions of one,
    `embedding` that of the embedding in layers, `rate` arrivals in what one replica serves."""

    layers: int
    layer_ns: int
    load: float
    embedding: float
    rate: float
    capped: bool

    def trial(self, seed: int) -> Trial:
        step = self.layer_ns * self.load
        embedding_ns = round(step * self.embedding)
        ready = tuple(embedding_ns + round(step * (k + 1)) for k in range(self.layers))
        per_s = self.rate * 1e9 / (self.layers * self.layer_ns)
        count = max(1, int(2 * ready[-1] * per_s / 1e9))
        times = [at for at in poisson_arrivals(count, per_s, seed) if at < ready[-1]]
        arrivals = tuple(Arrival(at, self.layer_ns) for at in times)
        return Trial(Pair(ready, arrivals, cap=pending_cap if self.capped else None), embedding_ns)


def read_trial(path: Path, capped: bool) -> Trial:
    """A recorded load. Raises InputError that names the file and the field."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=RecordedPair)
        if found.pair != 1:
            raise ValueError(f"pair: {found.pair}; accepted: 1")
        if not found.requests:
            raise ValueError("requests: empty; at least one is needed")
        pair = Pair(
            found.ready_ns,
            tuple(Arrival(one.arrival_ns, one.layer_ns) for one in found.requests),
            old_free_ns=found.old_free_ns,
            cap=pending_cap if capped else None,
        )
        if not 0 <= found.embedding_ns <= found.ready_ns[0]:
            raise ValueError(f"embedding_ns: {found.embedding_ns}; 0 to {found.ready_ns[0]}")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    return Trial(pair, found.embedding_ns)


def run_policy(pair: Pair, policy: Policy) -> Outcome:
    planner = planner_for(pair) if policy is Policy.ILP else None
    return simulate(pair, policy, planner)


@dataclass(slots=True)
class Figures:
    ttft_ns: list[int] = dataclasses.field(default_factory=list)
    completed: int = 0
    """Prefills that ended before the load did."""
    stall_ns: int = 0

    def add(self, pair: Pair, outcome: Outcome) -> None:
        for one, ttft in zip(pair.arrivals, outcome.ttft_ns(pair), strict=True):
            if one.at_ns <= pair.loaded_ns:
                self.ttft_ns.append(ttft)
        self.completed += sum(end <= pair.loaded_ns for end in outcome.finish_ns)
        self.stall_ns += outcome.stall_ns

    @property
    def mean_ns(self) -> float:
        return sum(self.ttft_ns) / len(self.ttft_ns)


def run_trials(trials: Sequence[Trial], policy: Policy) -> Figures:
    figures = Figures()
    for trial in trials:
        figures.add(trial.pair, run_policy(trial.pair, policy))
    return figures


def embedding_share(trials: Sequence[Trial], mean_ns: float) -> dict[str, float]:
    """Of what ilp_free's mean TTFT (`mean_ns`) lies above that of a New that has all layers
    at time 0, the share that is gone when the embedding takes no time to arrive."""
    no_embedding, loaded = Figures(), Figures()
    for trial in trials:
        pair = trial.pair
        earlier = tuple(at - trial.embedding_ns for at in pair.ready_ns)
        nothing = tuple(0 for _ in pair.ready_ns)
        for figures, ready in ((no_embedding, earlier), (loaded, nothing)):
            outcome = simulate(dataclasses.replace(pair, ready_ns=ready))
            # The same requests as with the real load.
            figures.add(pair, outcome)
    gap = mean_ns - loaded.mean_ns
    return {
        "gap_ms": gap / 1e6,
        "embedding_ms": (mean_ns - no_embedding.mean_ns) / 1e6,
        "share": (mean_ns - no_embedding.mean_ns) / gap if gap > 0 else 0.0,
    }


def compare(trials: Sequence[Trial], asked: dict[str, object]) -> tuple[dict[str, object], Table]:
    """The report of all policies, and its table. Times in ms; ratios to stop_the_world.
    Raises InputError when no request arrives during any load."""
    figures = {policy: run_trials(trials, policy) for policy in Policy}
    base = figures[Policy.STOP_THE_WORLD]
    if not base.ttft_ns:
        raise InputError("no request arrives during the load: a longer load or a higher rate")
    base_p99 = percentile(base.ttft_ns, 99)
    rows = []
    for policy, one in figures.items():
        p99 = percentile(one.ttft_ns, 99)
        rows.append(
            (
                policy.value,
                one.mean_ns / 1e6,
                one.mean_ns / base.mean_ns,
                p99 / 1e6,
                p99 / base_p99,
                one.completed,
                one.stall_ns / 1e6,
            )
        )
    columns = ("policy", "mean_ms", "mean_ratio", "p99_ms", "p99_ratio")
    table = Table("live pair", (*columns, "in_load", "stall_ms"), rows)
    report = {
        "asked": asked,
        "loads": len(trials),
        "requests": len(base.ttft_ns),
        "load_ms": sum(trial.pair.loaded_ns for trial in trials) / len(trials) / 1e6,
        "policies": table.as_dicts(),
        "embedding": embedding_share(trials, figures[Policy.ILP_FREE].mean_ns),
    }
    return sealed(report), table
