"""What serving during a load gains, on two real workers: `python -m benchmarks.bench_zigzag`.

This process is the source of the weights, which lets a layer go every `LOAD` executions of one,
the embedding's time first, and plays the daemon: live, requests go to New under BlitzScale's cap
and Old follows it; stopping the world, Old serves alone until the last layer is there. Layers are
paced (`pace_layer_ms`), so that two cores stand for two replicas. Both sides take turns in one
run, on the same arrivals. `max_tokens` is 1: only prefill is timed. Then `sim zigzag`'s model
runs on the run's own arrivals and layer arrivals. Needs a machine with nothing else to do: a core
that is not there when a layer is due is time that the model does not know of.
"""

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched.pair_model import Arrival, Pair, Policy, simulate
from blitzd.sched.zigzag import pending_cap
from blitzd.sim.arrivals import poisson_arrivals
from blitzd.sim.stats import percentile
from tests.engine.local_replica import request
from tests.engine.test_live_pairs import Gate, New, emptied, follow
from tests.engine.workers import Client, Zygote, up, zygote
from tests.tiny import make_tiny

SHAPE = {"layers": 12, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 512}
LAYERS = SHAPE["layers"]
LAYER_S = 0.030
LOAD = 6.0
EMBEDDING = 3.0
RATE = 1.75
PROMPT = "x" * 60


@dataclass
class Seen:
    """One load. Times in s since it began."""

    arrivals: list[float] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    ready: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> list[float]:
        return [self.ends[n] - at for n, at in enumerate(self.arrivals, 1)]

    @property
    def completed(self) -> int:
        return sum(end <= self.ready[-1] for end in self.ends.values())

    def predicted(self, policy: Policy) -> int:
        pair = Pair(
            tuple(round(at * 1e9) for at in self.ready),
            tuple(Arrival(round(at * 1e9), round(LAYER_S * 1e9)) for at in self.arrivals),
            cap=pending_cap,
        )
        outcome = simulate(pair, policy)
        return sum(end <= pair.loaded_ns for end in outcome.finish_ns)


class Run:
    def __init__(self, new: New, old: Client, seed: int, live: bool) -> None:
        self.new, self.old, self.live = new, old, live
        self.seen = Seen()
        rate = RATE / (LAYERS * LAYER_S)
        load_s = LAYER_S * LOAD * (LAYERS + EMBEDDING)
        times = [at / 1e9 for at in poisson_arrivals(200, rate, seed)]
        self.times = [at for at in times if at < load_s * 0.98]
        self.queue: list[int] = []
        self.at: dict[int, Client] = {}
        self.moved = asyncio.Event()

    async def run(self) -> Seen:
        self.began = time.monotonic()
        following = None
        if self.live:
            following = follow(self.old, self.new.client, pb.Transport.MAP)
        tasks = [asyncio.create_task(work) for work in (self.layers(), self.arrive())]
        while len(self.seen.ends) < len(self.times):
            self.look()
            await self.dispatch()
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        await self.new.loading
        if following is not None:
            reply = await following
            assert not reply.fault, reply
        return self.seen

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    async def layers(self) -> None:
        step = LAYER_S * LOAD
        for layer in range(1, LAYERS + 1):
            await asyncio.sleep(max(0.0, step * (layer + EMBEDDING) - self.now))
            await self.new.until(layer)
            self.seen.ready.append(self.now)

    async def arrive(self) -> None:
        for number, at in enumerate(self.times, 1):
            await asyncio.sleep(max(0.0, at - self.now))
            self.seen.arrivals.append(self.now)
            self.queue.append(number)

    def look(self) -> None:
        for number in list(self.at):
            for client in (self.new.client, self.old):
                if number in client.outputs and client.outputs[number].ended:
                    self.seen.ends[number] = self.now
                    self.at.pop(number, None)
        if self.live:
            for number in self.new.client.relayed:
                if number in self.at:
                    self.at[number] = self.old

    async def dispatch(self) -> None:
        loaded = len(self.seen.ready) == LAYERS
        busy = [sum(at is one for at in self.at.values()) for one in (self.new.client, self.old)]
        if self.live:
            cap = pending_cap(round(self.now * 1e9))
            place = self.new.client if busy[0] < cap else None
            if loaded and not busy[1] and self.new.loading.done():
                place = self.old
        else:
            place = self.old if not busy[1] else None
            if place is None and loaded and not busy[0] and self.new.loading.done():
                place = self.new.client
        if place is not None and self.queue:
            number = self.queue.pop(0)
            self.at[number] = place
            await place.prefill(request(number, PROMPT, 1), hold=True)


async def one(zygotes: Zygote, model: Path, hollow: Path, seed: int, live: bool) -> Seen:
    options = {"replica": {"pace_layer_ms": LAYER_S * 1e3}}
    old = await up(zygotes, "old", model, 40, **options)
    process = zygotes.start("new", **options)
    client = await Client.connect("new", zygotes.epochs["new"], process)
    async with Gate(model, zygotes.directory) as gate:
        new = New(client, gate, hollow)
        await new.until(0)
        await client.watch()
        seen = await Run(new, old, seed, live).run()
        await emptied(client, old)
        for each in (client, old):
            await each.close()
            each.process.kill()
            await each.process.wait()
    return seen


async def main(loads: int) -> None:
    seen: dict[bool, list[Seen]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as scratch:
        model, hollow = Path(scratch) / "model", Path(scratch) / "hollow"
        make_tiny(model, "float64", **SHAPE)
        shutil.copytree(model, hollow, ignore=shutil.ignore_patterns("arena.bin"))
        with zygote(Path(scratch)) as zygotes:
            for seed in range(loads):
                for live in (True, False) if seed % 2 else (False, True):
                    seen[live].append(await one(zygotes, model, hollow, seed, live))
    ttft = {live: [t for load in found for t in load.ttft] for live, found in seen.items()}
    ns = {live: [round(t * 1e9) for t in found] for live, found in ttft.items()}
    done = {live: sum(load.completed for load in found) for live, found in seen.items()}
    predicted = {
        live: sum(load.predicted(policy) for load in seen[live])
        for live, policy in ((True, Policy.ILP_FREE), (False, Policy.STOP_THE_WORLD))
    }
    mean = statistics.mean(ttft[True]) / statistics.mean(ttft[False])
    p99 = percentile(ns[True], 99) / percentile(ns[False], 99)
    print(
        f"{loads} loads, {len(ttft[True])} requests a side, {LAYERS} layers of {LAYER_S * 1e3} ms"
    )
    print(f"mean TTFT {mean:.3f}, p99 {p99:.3f} of stop-the-world")
    for live, name in ((True, "live"), (False, "stop-the-world")):
        share = done[live] / predicted[live]
        print(f"{name}: {done[live]} prefills in the loads, {share:.2f} of the model's")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 30))
