"""How fast the inner simulator is, and how near to a measured run.

    python benchmarks/bench_sim.py [--trace FILE] [--rounds 3] [--skip-validation]

Speed: the same requests through the jumping lane, a bare heapq loop and simpy, both of which
take every iteration as an event; interleaved rounds, the best of each, and all three must
give the same times to the nanosecond. Validation: Llama-3.1-8B on an RTX 4090, rates fitted
to the first third of the run.
"""

import argparse
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import simpy
from rich.console import Console

from blitzd.sim.calibrate import Engine, calibrate, compare, load_measured, replay
from blitzd.sim.data import AZURE_CONV, RTX4090_REQUESTS
from blitzd.sim.hardware import GPUS
from blitzd.sim.lane import Job, Lane
from blitzd.sim.models import MODELS
from blitzd.sim.report import Table
from blitzd.sim.roofline import Roofline
from blitzd.sim.steptimes import RooflineSteps
from blitzd.sim.traces import load_trace

MODEL, GPU = MODELS["llama-3.1-8b"], GPUS["h100"]
PREFILL_TOKENS = 2048


class SteppedReplica:
    """Prefill-first batching with ample KV, one iteration at a time, for the other two loops."""

    def __init__(self, steps: RooflineSteps) -> None:
        self.steps = steps
        self.waiting: deque[Job] = deque()
        self.ends: list[tuple[int, int, int, Job]] = []
        self.step = self.order = self.context = 0

    def iterate(self, now: int) -> int:
        """Runs the iteration that starts at `now`; returns its end, `now` when idle."""
        if self.waiting:
            return self._prefill(now)
        if not self.ends:
            return now
        base, slope = self.steps.decode(len(self.ends))
        now += base + slope * self.context
        self.step += 1
        self.context += len(self.ends)
        while self.ends and self.ends[0][0] == self.step:
            end_step, _, joined_context, job = heapq.heappop(self.ends)
            self.context -= joined_context + end_step
            job.end_ns = now
        return now

    def _prefill(self, now: int) -> int:
        batch = [self.waiting.popleft()]
        tokens = batch[0].prompt_tokens
        while self.waiting and tokens + self.waiting[0].prompt_tokens <= PREFILL_TOKENS:
            batch.append(self.waiting.popleft())
            tokens += batch[-1].prompt_tokens
        now += self.steps.prefill_ns([job.prompt_tokens for job in batch])
        for job in batch:
            job.first_ns = now
            if job.output_tokens == 1:
                job.end_ns = now
                continue
            end_step = self.step + job.output_tokens - 1
            known = job.prompt_tokens + 1
            heapq.heappush(self.ends, (end_step, self.order, known - self.step, job))
            self.order += 1
            self.context += known
        return now


def run_lane(jobs: list[Job], steps: RooflineSteps) -> None:
    lane = Lane(steps, max_batch=1 << 20, budget_tokens=PREFILL_TOKENS)
    for job in jobs:
        lane.advance(job.arrival_ns)
        lane.push(job)
    lane.drain()


def run_heapq(jobs: list[Job], steps: RooflineSteps) -> None:
    """Events (time, kind, index): arrivals first, then the end of an iteration."""
    replica = SteppedReplica(steps)
    events = [(job.arrival_ns, 0, index) for index, job in enumerate(jobs)]
    heapq.heapify(events)
    busy = False
    while events:
        now, kind, index = heapq.heappop(events)
        if kind == 0:
            replica.waiting.append(jobs[index])
            if busy or (events and events[0][:2] == (now, 0)):
                continue
        end = replica.iterate(now)
        busy = end > now
        if busy:
            heapq.heappush(events, (end, 1, 0))


def run_simpy(jobs: list[Job], steps: RooflineSteps) -> None:
    environment = simpy.Environment()
    replica = SteppedReplica(steps)
    wake = [environment.event()]

    def arrivals() -> Iterator[simpy.Event]:
        for job in jobs:
            if job.arrival_ns > environment.now:
                yield environment.timeout(job.arrival_ns - environment.now)
            replica.waiting.append(job)
            if not wake[0].triggered:
                wake[0].succeed()

    def server() -> Iterator[simpy.Event]:
        while True:
            end = replica.iterate(environment.now)
            if end > environment.now:
                yield environment.timeout(end - environment.now)
            else:
                wake[0] = environment.event()
                yield wake[0]

    environment.process(arrivals())
    environment.process(server())
    environment.run()


def bench_speed(trace: Path, rounds: int, console: Console) -> None:
    requests = load_trace(trace)
    roofline = Roofline(MODEL, GPU, 1)
    loops: dict[str, Callable[[list[Job], RooflineSteps], None]] = {
        "jumping lane": run_lane,
        "bare heapq loop": run_heapq,
        "simpy": run_simpy,
    }
    rows: list[tuple[str | int | float, ...]] = []
    for load in (1, 2):
        best = dict.fromkeys(loops, float("inf"))
        results = {}
        for _ in range(rounds):
            for name, loop in loops.items():
                jobs = [Job(r.arrival_ns // load, *r[1:]) for r in requests]
                started = time.perf_counter()
                loop(jobs, RooflineSteps(roofline))
                best[name] = min(best[name], time.perf_counter() - started)
                results[name] = jobs
        assert all(jobs == results["jumping lane"] for jobs in results.values())
        for name, seconds in best.items():
            rate = len(requests) / seconds
            rows.append((load, name, round(rate), best["simpy"] / seconds))
    title = f"{len(requests)} Azure conv requests, {MODEL.name} on one {GPU.name}, equal results"
    Table(title, ("load", "loop", "requests per s", "times simpy"), rows).print(console)


def bench_validation(console: Console) -> None:
    measured = load_measured(RTX4090_REQUESTS)
    model, gpu, engine = MODEL, GPUS["rtx4090"], Engine(2048, 256)
    window = max(job.end_ns for job in measured) // 3
    rule = Roofline(model, gpu, 1).kv_capacity_tokens() // 16
    found = calibrate(measured, model, gpu, engine, window, range(rule - 48, rule + 49, 12))
    rates = found.rates
    console.print(
        f"first third: {rates.bytes_per_s / 1e9:.0f} GB/s, {rates.flops_per_s / 1e12:.0f} TFLOP/s, "
        f"{rates.overhead_s * 1e3:.2f} ms a step, {found.kv_blocks} KV blocks, "
        f"token times within {found.error_s:.2f} s rms"
    )
    replayed, _ = replay(measured, model, rates, found.kv_blocks, engine)
    compare(measured, replayed).print(console)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=AZURE_CONV)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-validation", action="store_true")
    arguments = parser.parse_args()
    console = Console()
    bench_speed(arguments.trace, arguments.rounds, console)
    if not arguments.skip_validation:
        bench_validation(console)


if __name__ == "__main__":
    main()
