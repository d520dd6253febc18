"""KV one way and weights the other on one link, and what idle workers of a fabric cost.

    sudo .venv/bin/python benchmarks/hosts/bench_flows.py

Two hosts (network namespaces) over a link of limited rate, with real workers: a prefill on h1
whose KV a decode on h0 imports, one hand-over right after the other, while a new replica gets
its weights. `opposite`: they go from the decode to a replica on h1, so that the decode's
worker sends weights and takes KV at the same time. `same`: from the prefill to a replica on
h0, which the planner never does. Each round measures KV alone, weights alone and both, in
turns; a ratio is what the flow has of what it has alone (1.0: it loses nothing). Hand-overs
count that lie wholly within the time that the weights take.

Then nothing is asked for, with every endpoint open: CPU time of each worker.
"""

import asyncio
import itertools
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cyclopts

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from blitzd.engine.catalogue import prepared_dir
from blitzd.engine.layout import read_model_file
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.workers import Client, Zygote, zygote
from tests.hosts.netns import Hosts, hosts, why_not
from tests.hosts.transfers import LIMIT_S, receive

PROMPT_TOKENS = 1000
BLOCKS = 32
REQUEST_ID = 1
WAYS = ("opposite", "same")


class Moved(NamedTuple):
    """A hand-over."""

    began: float
    ended: float
    size: int

    @property
    def rate(self) -> float:
        return self.size / (self.ended - self.began)


class Cluster:
    """The prefill on h1, the decode on h0, and how to add to them."""

    def __init__(self, zygotes: Zygote, made: Hosts, model: Path, hollow: Path) -> None:
        self._zygotes = zygotes
        self._made = made
        self._model = model
        self._hollow = hollow
        self._leases: Iterator[int] = itertools.count(1)
        self._new = itertools.count()
        self.clients: list[Client] = []

    async def _start(self, name: str, host: int) -> Client:
        namespace = self._made.name(host)
        process = self._zygotes.start(name, namespace=namespace, orphan_timeout_s=2 * LIMIT_S)
        client = await Client.connect(name, self._zygotes.epochs[name], process)
        self.clients.append(client)
        return client

    async def up(self) -> None:
        self.decode, self.prefill = await self._start("d0", 0), await self._start("p1", 1)
        for client in (self.decode, self.prefill):
            await client.load_model(self._model, BLOCKS)
            await client.watch()
        tokens = [1000 + step for step in range(PROMPT_TOKENS)]
        sampling = pb.Sampling(ignore_eos=True)
        self._request = pb.Request(
            request_id=REQUEST_ID, prompt_tokens=tokens, max_tokens=2, sampling=sampling
        )
        await self.prefill.prefill(self._request, hold=True)
        held = await self.prefill.until(REQUEST_ID, LIMIT_S)
        assert held.finish is pb.FinishReason.HELD, held.error
        self._request.output_tokens = list(held.tokens)
        await self.hand_over()  # the first one connects

    async def hand_over(self) -> Moved:
        """The source holds the KV, and a newer lease may have it once more."""
        began = time.monotonic()
        report = await self.decode.import_from(
            self.prefill,
            self._request,
            pb.Transport.UCX,
            lease_id=next(self._leases),
            timeout=LIMIT_S,
        )
        return Moved(began, time.monotonic(), report.bytes_moved)

    async def weights(self, way: str) -> tuple[float, float]:
        """When a new replica began to get them, and had them all."""
        source, host = (self.decode, 1) if way == "opposite" else (self.prefill, 0)
        target = await self._start(f"n{next(self._new)}", host)
        began = time.monotonic()
        await receive(target, self._hollow, [source])
        return began, time.monotonic()

    async def both(self, way: str) -> tuple[float, list[Moved]]:
        """Seconds for the weights, and the hand-overs in that time."""
        moved: list[Moved] = []

        async def keep_on() -> None:
            while True:
                moved.append(await self.hand_over())

        flow = asyncio.create_task(keep_on())
        began, ended = await self.weights(way)
        flow.cancel()
        await asyncio.gather(flow, return_exceptions=True)
        await self.hand_over()  # what was cut off leaves nothing behind
        return ended - began, [m for m in moved if began <= m.began and m.ended <= ended]

    async def down(self) -> None:
        for client in self.clients:
            await client.close()
            client.process.kill()
            await client.process.wait()


def cpu_s(client: Client) -> float:
    stat = Path(f"/proc/{client.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


async def measure_flows(cluster: Cluster, size: int, rounds: int) -> None:
    print("way       weights alone  with KV  ratio     KV alone  with weights  ratio  n   load")
    for way in WAYS * rounds:
        kv_alone = statistics.median([(await cluster.hand_over()).rate for _ in range(4)])
        began, ended = await cluster.weights(way)
        took, moved = await cluster.both(way)
        kv = statistics.median([m.rate for m in moved]) if moved else 0.0
        alone = ended - began
        print(
            f"{way:9} {size / alone / 1e6:8.1f} MB/s {size / took / 1e6:8.1f} {alone / took:6.3f}"
            f" {kv_alone / 1e6:7.1f} MB/s {kv / 1e6:13.1f} {kv / kv_alone:6.3f} {len(moved):2}"
            f" {os.getloadavg()[0]:6.1f}",
            flush=True,
        )


async def measure_idle(cluster: Cluster, seconds: float) -> None:
    await asyncio.sleep(2.0)
    before = [cpu_s(client) for client in cluster.clients]
    await asyncio.sleep(seconds)
    print(f"idle for {seconds:.0f} s, load {os.getloadavg()[0]:.1f}:")
    for client, spent in zip(cluster.clients, before, strict=True):
        peers = (await client.holdings()).peers
        share = (cpu_s(client) - spent) / seconds
        print(f"  {client.replica:3} {share:7.2%} of a core, connected to {', '.join(peers)}")


async def measure(made: Hosts, model: Path, hollow: Path, directory: Path, options: "Plan") -> None:
    size = read_model_file(model).layout.length
    goodput = made.goodput(0, 1)
    print(
        f"weights {size / 1e6:.0f} MB, link {made.rate_mbit:.0f} Mbit/s each way, TCP goodput"
        f" {goodput / 1e6:.1f} MB/s, {os.cpu_count()} cores"
    )
    with zygote(directory) as zygotes:
        cluster = Cluster(zygotes, made, model, hollow)
        try:
            await cluster.up()
            await measure_flows(cluster, size, options.rounds)
            await measure_idle(cluster, options.idle_s)
        finally:
            await cluster.down()


class Plan(NamedTuple):
    rounds: int
    idle_s: float


def main(
    model: Path | None = None, rate: float = 400.0, rounds: int = 3, idle_s: float = 30.0
) -> int:
    """Print the table.

    Parameters
    ----------
    model
        A prepared directory; by default the embedded model's.
    rate
        Of the link and each way, Mbit/s.
    rounds
        Of both ways.
    idle_s
        How long to watch idle workers.
    """
    reason = why_not()
    if reason:
        print(f"no hosts on this box: {reason}", file=sys.stderr)
        return 1
    if model is None:
        # In float32: a CPU computes the prompt in seconds, and KV is twice as much.
        model = next(prepared_dir().glob("SmolLM2-135M*-float32-*"), None)
    if model is None:
        print("no prepared model; run: blitzd up, once", file=sys.stderr)
        return 1
    # Told to end, it leaves no namespace behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    directory = Path(tempfile.mkdtemp(prefix="bz"))
    try:
        hollow = directory / "hollow"
        shutil.copytree(model, hollow, ignore=shutil.ignore_patterns("arena.bin"))
        with hosts(2, rate) as made:
            asyncio.run(measure(made, model, hollow, directory, Plan(rounds, idle_s)))
    finally:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    cyclopts.run(main)
