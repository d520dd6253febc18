"""Weights to several hosts at once: a chain as planned, against repeated point to point; and
shards over two links of each host.

    sudo .venv/bin/python benchmarks/hosts/bench_multicast.py

Hosts are network namespaces, joined over links of limited rate, since unthrottled loopback
on a few cores is bound by copying. Each count of receivers is run as a chain and point to
point, in turns; a ratio is the time until the last receiver is whole and checked, over the
time that the arena's bytes take at the link's goodput, which is that of a plain TCP
connection measured right before. 1.0 cannot be reached: every hop forwards a whole chunk.

Shards go to machines with a worker at each of their links; there the ratio is to what half
the arena takes at the goodput of one link, and the copy of the other half out of memory.
"""

import asyncio
import mmap
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import cyclopts
import numpy as np
from cyclopts import Parameter
from grpclib.exceptions import GRPCError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from blitzd.control import shards
from blitzd.control.chunks import chunk_bytes
from blitzd.control.multicast import Chain, arrivals
from blitzd.engine.catalogue import prepared_dir
from blitzd.engine.layout import read_model_file
from blitzd.fabric import SharedArena
from tests.engine.workers import Client, zygote
from tests.hosts.netns import Hosts, hosts, why_not
from tests.hosts.transfers import (
    alone,
    chained,
    multicast,
    receive,
    sharded,
    topology_of,
    wide_topology,
    workers,
)

COUNTS = (1, 2, 4, 6)
MACHINES = (1, 2)
LINKS = 2


def cpu_s(clients: dict[str, Client]) -> float:
    ticks = 0
    for client in clients.values():
        stat = Path(f"/proc/{client.process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(
    made: Hosts,
    model: Path,
    hollow: Path,
    directory: Path,
    counts: tuple[int, ...],
    unicast: bool,
    chunk_kib: int,
) -> None:
    size = read_model_file(model).layout.length
    print(f"arena {size / 1e6:.0f} MB, links {made.rate_mbit:.0f} Mbit/s, {os.cpu_count()} cores")
    print("receivers  way     goodput   ideal    last  ratio  planned  chunk KiB  CPU s  load")
    with zygote(directory) as zygotes:
        for count in counts:
            targets = [f"h{i + 1}" for i in range(count)]
            for way in ("chain", "p2p") if unicast else ("chain",):
                goodput = made.goodput(0, 1)
                topology = topology_of(made, goodput)
                chains = chained(topology, "h0", targets) if way == "chain" else []
                hops = count if way == "chain" else 1
                chunk = chunk_kib << 10 or chunk_bytes(size, hops, round(goodput))
                async with workers(zygotes, made, count + 1) as clients:
                    await receive(clients["h0"], model, [])
                    before = cpu_s(clients)
                    plan = chains or alone("h0", targets)
                    try:
                        took = await multicast(clients, hollow, plan, chunk)
                    except GRPCError as error:  # streams that share a link may starve one
                        print(f"{count:9}  {way:5} failed: {error.message}", flush=True)
                        continue
                    spent = cpu_s(clients) - before
                ideal, last = size / goodput, max(took.values())
                load, _, _ = os.getloadavg()
                planned = max(
                    arrivals(topology, one, size, chunk)[-1]
                    for one in chains or [Chain("h0", ("h1",))]
                ) * (1 if chains else count)
                print(
                    f"{count:9}  {way:5} {goodput / 1e6:6.1f} MB/s {ideal:6.2f} s {last:6.2f} s"
                    f"  {last / ideal:5.3f} {planned:6.2f} s  {chunk >> 10:9}  {spent:5.2f}"
                    f"  {load:4.1f}",
                    flush=True,
                )


def gather_s(size: int) -> float:
    """What a copy of so many bytes takes, out of a mapping onto memory that is not there yet."""
    mapped = SharedArena(size, prefault=True)
    target = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    began = time.monotonic()
    target[:] = mapped.bytes
    return time.monotonic() - began


async def measure_shards(
    rate: float,
    model: Path,
    hollow: Path,
    directory: Path,
    machines: tuple[int, ...],
    chunk_kib: int,
) -> None:
    size = read_model_file(model).layout.length
    print(f"\n{LINKS} links a machine of {rate:.0f} Mbit/s, a worker at each")
    print(
        "machines  goodput of one   ideal  gather    last  ratio  planned  chunk KiB  CPU s  load"
    )
    with zygote(directory) as zygotes:
        for count in machines:
            with hosts(count + 1, rate, LINKS) as made:
                goodput = made.goodput(0, 1)
                gather = gather_s(size - size // LINKS)
                topology = wide_topology(made, goodput, (size - size // LINKS) / gather)
                plan = sharded(topology, "h0")
                chunk = chunk_kib << 10 or chunk_bytes(size // LINKS, count, round(goodput))
                async with workers(zygotes, made, count + 1) as clients:
                    sources = [clients[chain.source] for chain in plan.chains]
                    for source in sources:
                        await receive(source, model, [])
                    before = cpu_s(clients)
                    last = max((await multicast(clients, hollow, plan, chunk)).values())
                    spent = cpu_s(clients) - before
            ideal = size / LINKS / goodput
            load, _, _ = os.getloadavg()
            planned = max(shards.arrivals(topology, plan, size, chunk).values())
            print(
                f"{count:8}  {goodput / 1e6:9.1f} MB/s {ideal:6.2f} s {gather:5.2f} s {last:6.2f} s"
                f"  {last / (ideal + gather):5.3f} {planned:6.2f} s  {chunk >> 10:9}  {spent:5.2f}"
                f"  {load:4.1f}",
                flush=True,
            )


def main(
    model: Path | None = None,
    rate: float = 400.0,
    receivers: Annotated[tuple[int, ...], Parameter(negative=())] = COUNTS,
    unicast: bool = True,
    machines: Annotated[tuple[int, ...], Parameter(negative=())] = MACHINES,
    chunk_kib: int = 0,
) -> int:
    """Print the table.

    Parameters
    ----------
    model
        A prepared directory; by default the embedded model's with the smallest arena here.
    rate
        Of each link and way, Mbit/s.
    receivers
        Counts of receivers.
    unicast
        Also point to point.
    machines
        Counts of machines that take shards in over two links each.
    chunk_kib
        Of a message, KiB; 0: as planned.
    """
    reason = why_not()
    if reason:
        print(f"no hosts on this box: {reason}", file=sys.stderr)
        return 1
    if model is None:
        here = sorted(prepared_dir().glob("SmolLM2-135M*"), key=lambda d: arena(d).stat().st_size)
        if not here:
            print("no prepared model; run: blitzd up, once", file=sys.stderr)
            return 1
        model = here[0]
    # Told to end, it leaves no namespace behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    directory = Path(tempfile.mkdtemp(prefix="bz"))
    try:
        hollow = directory / "hollow"
        shutil.copytree(model, hollow, ignore=shutil.ignore_patterns("arena.bin"))
        if receivers:
            with hosts(max(receivers) + 1, rate) as made:
                asyncio.run(measure(made, model, hollow, directory, receivers, unicast, chunk_kib))
        if machines:
            asyncio.run(measure_shards(rate, model, hollow, directory, machines, chunk_kib))
    finally:
        shutil.rmtree(directory)
    return 0


def arena(directory: Path) -> Path:
    return directory / "arena.bin"


if __name__ == "__main__":
    cyclopts.run(main)
