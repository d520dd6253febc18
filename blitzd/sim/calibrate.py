"""Fits the roofline's three rates to a measured run, and compares a replay with it.

The live scheduler replays the measured arrivals; each step is priced as bytes read over a
memory rate (weights, unless computing takes longer, and KV), FLOPs over a compute rate, and a
fixed overhead. Given which steps the replay took, the time of every first and last token is
linear in the three; so replay and least squares alternate. No rate may exceed the data sheet's
peak. Only tokens made inside the window take part.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blitzd.sched import StepPlan
from blitzd.sim.coefficients import nonnegative_lstsq
from blitzd.sim.errors import InputError, TraceError
from blitzd.sim.hardware import Gpu
from blitzd.sim.lane import Job
from blitzd.sim.models import Model
from blitzd.sim.replay import Replay, scheduler_for
from blitzd.sim.report import Table
from blitzd.sim.requests import check_length
from blitzd.sim.stats import percentile

BLOCK_TOKENS = 16
ROUNDS = 6
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Engine:
    """How the measured server was set up."""

    max_batch_tokens: int
    max_batch_size: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What the hardware achieves, not its peaks."""

    bytes_per_s: float
    flops_per_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    rates: Rates
    kv_blocks: int
    error_s: float
    """Root mean square error of the token times in the window."""


def load_measured(path: Path) -> list[Job]:
    """Measured requests in LLMServingSim's form, times in ns since the first arrival.

    Arrivals are on the client's clock, tokens on the server's; the smallest difference from
    arrival to queue joins the two. Raises InputError or TraceError.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    rows = [_measured_row(path, number, line) for number, line in enumerate(lines, 1) if line]
    if not rows:
        raise TraceError(path, 1, "requests", "the file is empty")
    start = rows[0]["arrival_time"]
    offset = min(row["queued_ts"] - row["arrival_time"] for row in rows) + start
    return [
        Job(
            round((row["arrival_time"] - start) * 1e9),
            int(row["input_toks"]),
            int(row["output_toks"]),
            round((row["first_token_ts"] - offset) * 1e9),
            round((row["last_token_ts"] - offset) * 1e9),
        )
        for row in rows
    ]


def _measured_row(path: Path, number: int, line: str) -> dict[str, float]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(path, number, "record", f"not JSON: {error}") from error
    for field in ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts"):
        if not isinstance(row.get(field), int | float):
            raise TraceError(path, number, field, f"{row.get(field)!r} is not a time")
    for field in ("input_toks", "output_toks"):
        check_length(path, number, field, row.get(field))
    return {key: value for key, value in row.items() if isinstance(value, int | float)}


class RooflineCost:
    """Prices a step and keeps the sums of what it priced: (bytes, FLOPs, steps)."""

    def __init__(self, model: Model, rates: Rates) -> None:
        self.model, self.rates = model, rates
        self.work = [0, 0, 0]
        self.spent_ns = 0

    def __call__(self, plan: StepPlan) -> int:
        model, rates = self.model, self.rates
        tokens = size = flops = 0
        for chunk in plan.chunks:
            tokens += chunk.count
            if chunk.count == 1:
                size += model.kv_bytes_per_token * (chunk.start + 1)
            else:
                flops += model.attention_flops(chunk.count, chunk.start)
        linear = tokens * model.matmul_flops_per_token
        if linear / rates.flops_per_s > model.weight_bytes / rates.bytes_per_s:
            flops += linear
        else:
            size += model.weight_bytes
        seconds = size / rates.bytes_per_s + flops / rates.flops_per_s + rates.overhead_s
        self.work = [self.work[0] + size, self.work[1] + flops, self.work[2] + 1]
        self.spent_ns += round(seconds * 1e9)
        return round(seconds * 1e9)


@dataclass(slots=True)
class Events:
    """When tokens were made in a replay and in the measurement, and by how much work."""

    work: list[list[int]]
    replayed_ns: list[int]
    measured_ns: list[int]
    idle_ns: list[int]
    """Of the replay, up to the event: time that no rate explains."""


def replay(
    measured: Sequence[Job],
    model: Model,
    rates: Rates,
    kv_blocks: int,
    engine: Engine,
    window_ns: int | None = None,
) -> tuple[list[Job], Events]:
    """Serves the measured arrivals. With a window, stops a little after it, and the events
    are first and last tokens measured inside it."""
    jobs = [Job(job.arrival_ns, job.prompt_tokens, job.output_tokens) for job in measured]
    cost = RooflineCost(model, rates)
    scheduler = scheduler_for(
        kv_blocks, BLOCK_TOKENS, engine.max_batch_tokens, engine.max_batch_size
    )
    run = Replay(jobs, scheduler, cost)
    events = Events([], [], [], [])

    def record(_plan: StepPlan, made: list[tuple[int, bool, bool]]) -> None:
        for index, first, last in made:
            for happened, at in ((first, measured[index].first_ns), (last, measured[index].end_ns)):
                if happened and (window_ns is None or at < window_ns):
                    events.work.append(list(cost.work))
                    events.replayed_ns.append(run.now)
                    events.measured_ns.append(at)
                    events.idle_ns.append(run.now - cost.spent_ns)

    run.run(None if window_ns is None else window_ns * 115 // 100, record)
    return jobs, events


def calibrate(
    measured: Sequence[Job],
    model: Model,
    gpu: Gpu,
    engine: Engine,
    window_ns: int,
    kv_blocks: Sequence[int],
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Calibration:
    """The rates, and the one of the given KV capacities, that explain the window best."""
    best: Calibration | None = None
    for number, blocks in enumerate(kv_blocks, 1):
        found = _calibrate_rates(measured, model, gpu, engine, window_ns, blocks)
        if best is None or found.error_s < best.error_s:
            best = found
        on_progress(number, len(kv_blocks))
    if best is None:
        raise InputError("kv_blocks: at least one capacity to try is needed")
    return best


def _calibrate_rates(
    measured: Sequence[Job], model: Model, gpu: Gpu, engine: Engine, window_ns: int, blocks: int
) -> Calibration:
    peaks: Floats = np.array([1 / (gpu.memory_gb_s * 1e9), 1 / (gpu.tflops * 1e12), 0.0])
    inverse: Floats = peaks * 1.2 + np.array([0.0, 0.0, 1e-3])
    best: Calibration | None = None
    for _ in range(ROUNDS):
        rates = Rates(1 / float(inverse[0]), 1 / float(inverse[1]), float(inverse[2]))
        _, events = replay(measured, model, rates, blocks, engine, window_ns)
        replayed, times = (
            np.array(x, dtype=float) for x in (events.replayed_ns, events.measured_ns)
        )
        error = float(np.sqrt(np.mean((replayed - times) ** 2))) / 1e9
        if best is None or error < best.error_s:
            best = Calibration(rates, blocks, error)
        work: Floats = np.array(events.work, dtype=float)
        busy = (times - np.array(events.idle_ns)) / 1e9
        solved = peaks + nonnegative_lstsq(work, busy - work @ peaks)
        # Half way: with other rates the scheduler takes other steps.
        inverse = (inverse + solved) / 2
    assert best is not None
    return best


def compare(measured: Sequence[Job], replayed: Sequence[Job]) -> Table:
    """Throughput, TTFT and TPOT of both runs in s and tokens/s, and the relative error."""
    rows: list[tuple[str | int | float, ...]] = []
    throughput = [_throughput(jobs) for jobs in (measured, replayed)]
    rows.append(("throughput, tokens/s", *throughput, throughput[1] / throughput[0] - 1))
    for name, attribute in (("TTFT", "ttft_ns"), ("TPOT", "tpot_ns")):
        values = [[getattr(job, attribute) for job in jobs] for jobs in (measured, replayed)]
        means = [sum(v) / len(v) / 1e9 for v in values]
        tails = [percentile(v, 99) / 1e9 for v in values]
        rows.append((f"{name} mean, s", *means, means[1] / means[0] - 1))
        rows.append((f"{name} p99, s", *tails, tails[1] / tails[0] - 1))
    return Table("Replay against measurement", ("metric", "measured", "replayed", "error"), rows)


def _throughput(jobs: Sequence[Job]) -> float:
    return sum(job.output_tokens for job in jobs) / max(job.end_ns for job in jobs) * 1e9
