"""What handing KV over costs on this machine: `python benchmarks/bench_handover.py`.

Map: copies out of a peer's mapped arena, beside a plain memory copy of the same bytes on the
same kind of thread, turn about in one run; the ratio is the figure to keep, and none of a busy
machine is. UCX: two processes over loopback TCP, which moves every byte through the kernel
twice on shared cores: a floor, not a link. Pieces are 96 KiB, about one KV block of one layer,
in shuffled order. Workers: the whole of ImportKv between two real ones, from the call to the
request that runs, mapped, for a prompt of 1,500 tokens.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blitzd.engine.catalogue import prepared_dir
from blitzd.fabric import ArenaServer, MappedPeer, Segment, SharedArena, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.workers import up, zygote

MIB = 1 << 20
SIZES = (64 * MIB, 256 * MIB)
PIECE = 96 << 10
ROUNDS = 15
WARM_ROUNDS = 4
"""Until every block of the target's arena was written once: its pages come then."""
PINGS = 300
PROMPT_TOKENS = 1500
IDLE_S = 3.0
DEADLINE_S = 60.0


def shuffled(size: int) -> list[Segment]:
    starts = np.random.default_rng(1).permutation(np.arange(0, size, PIECE))
    return [(int(start), min(PIECE, size - int(start))) for start in starts]


def shapes(size: int) -> dict[str, list[Segment]]:
    return {"whole": [(0, size)], "pieces": shuffled(size)}


def soon() -> float:
    return time.monotonic() + DEADLINE_S


async def owner(pipe: Connection, socket: str) -> None:
    """The peer: serves an arena, then sends it over UCX as it is told."""
    arena = SharedArena(max(SIZES), prefault=True)
    arena.bytes[:] = np.random.default_rng(0).integers(0, 255, arena.size, dtype=np.uint8)
    server, fabric = ArenaServer(socket, arena, "owner/1"), UcxFabric("owner/1")
    await server.start()
    await fabric.start()
    pipe.send(fabric.address)
    target = pipe.recv()
    while (order := await asyncio.to_thread(pipe.recv)) is not None:
        what, tag, segments = order
        if what == "send":
            await fabric.send(target, tag, arena.buffer, segments, soon())
        elif what == "pong":
            small = np.zeros(8, dtype=np.uint8)
            for step in range(PINGS):
                await fabric.receive(target, tag + 2 * step, small, [(0, 8)], soon())
                await fabric.send(target, tag + 2 * step + 1, small, [(0, 8)], soon())
        else:
            await asyncio.sleep(IDLE_S)
            pipe.send(time.process_time())
    await fabric.close()
    await server.close()


def run_owner(pipe: Connection, socket: str) -> None:
    uvloop.run(owner(pipe, socket))


async def measure_map(socket: str) -> dict[str, float]:
    peer = await MappedPeer.connect(socket, "owner/1", soon())
    # Both ends are arenas, as in a worker. Against an array of numpy's, whose data lie 16
    # bytes into a page, the C library's copy of a piece takes twice as long.
    target, plain = (SharedArena(max(SIZES), prefault=True).bytes for _ in range(2))
    figures: dict[str, float] = {}
    for size in SIZES:
        for shape, segments in shapes(size).items():
            ours, theirs = [], []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                await peer.copy(segments, target, [(0, size)], soon())
                middle = time.perf_counter()
                await asyncio.to_thread(np.copyto, plain[:size], target[:size])
                ours.append(middle - start)
                theirs.append(time.perf_counter() - middle)
            name = f"map {size // MIB} MiB {shape}"
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            figures[f"{name} GB/s"] = size / min(ours) / 1e9
            figures[f"{name}, memcpy GB/s"] = size / min(theirs) / 1e9
            figures[f"{name} / memcpy"] = statistics.median(ratios)
            figures[f"{name} / memcpy, best to best"] = min(theirs) / min(ours)
    peer.close()
    return figures


async def measure_workers(model: Path, directory: Path) -> dict[str, float]:
    """A newer lease may have the KV that the source holds once more."""
    plain, copied = (SharedArena(max(SIZES), prefault=True).bytes for _ in range(2))
    ours, theirs, moved = [], [], 0
    with zygote(directory) as zygotes:
        source, target = [await up(zygotes, name, model, 80) for name in ("p", "d")]
        request = pb.Request(
            request_id=1,
            prompt_tokens=list(range(1000, 1000 + PROMPT_TOKENS)),
            max_tokens=2,
            sampling=pb.Sampling(ignore_eos=True),
        )
        await source.prefill(request, hold=True)
        request.output_tokens = list((await source.until(1, DEADLINE_S)).tokens)
        for lease in range(1, WARM_ROUNDS + ROUNDS + 1):
            start = time.perf_counter()
            report = await target.import_from(source, request, pb.Transport.MAP, lease_id=lease)
            middle = time.perf_counter()
            moved = report.bytes_moved
            await asyncio.to_thread(np.copyto, plain[:moved], copied[:moved])
            if lease > WARM_ROUNDS:
                ours.append(middle - start)
                theirs.append(time.perf_counter() - middle)
            await asyncio.sleep(0.2)  # it decodes its last token
        for client in (source, target):
            await client.close()
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    name = f"workers {moved / MIB:.0f} MiB"
    return {
        f"{name} GB/s": moved / min(ours) / 1e9,
        f"{name}, memcpy GB/s": moved / min(theirs) / 1e9,
        f"{name} / memcpy": statistics.median(ratios),
        f"{name} / memcpy, best to best": min(theirs) / min(ours),
    }


async def measure_ucx(pipe: Connection, fabric: UcxFabric, source: bytes) -> dict[str, float]:
    target = SharedArena(max(SIZES), prefault=True).bytes
    figures: dict[str, float] = {}
    for size in SIZES:
        for shape, segments in shapes(size).items():
            took = []
            busy = time.process_time()
            for _ in range(ROUNDS):
                tag = fabric.new_tag()
                start = time.perf_counter()
                pipe.send(("send", tag, segments))
                await fabric.receive(source, tag, target, [(0, size)], soon())
                took.append(time.perf_counter() - start)
            busy = (time.process_time() - busy) / ROUNDS
            name = f"ucx {size // MIB} MiB {shape}"
            figures[f"{name} GB/s"] = size / min(took) / 1e9
            figures[f"{name} receiver's core ms"] = busy * 1e3
    small, trips = np.zeros(8, dtype=np.uint8), []
    tag = fabric.new_tag() >> 16
    pipe.send(("pong", tag, []))
    for step in range(PINGS):
        start = time.perf_counter()
        await fabric.send(source, tag + 2 * step, small, [(0, 8)], soon())
        await fabric.receive(source, tag + 2 * step + 1, small, [(0, 8)], soon())
        trips.append(time.perf_counter() - start)
    figures["ucx 8 bytes there and back us"] = statistics.median(trips) * 1e6
    figures["ucx 8 bytes there and back us, best"] = min(trips) * 1e6
    return figures


async def measure_idle(pipe: Connection) -> dict[str, float]:
    """With an open connection and nothing to do."""
    before = time.process_time()
    pipe.send(("idle", 0, []))
    await asyncio.sleep(IDLE_S)
    figures = {"idle % of a core": (time.process_time() - before) / IDLE_S * 100}
    await asyncio.to_thread(pipe.recv)
    return figures


async def measure(pipe: Connection, socket: str) -> dict[str, float]:
    fabric = UcxFabric("target/1")
    await fabric.start()
    source = pipe.recv()
    pipe.send(fabric.address)
    figures = await measure_map(socket)
    figures |= await measure_ucx(pipe, fabric, source)
    figures |= await measure_idle(pipe)
    pipe.send(None)
    await fabric.close()
    return figures


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder) / "arena.sock")
        process = context.Process(target=run_owner, args=(theirs, socket), daemon=True)
        process.start()
        figures = uvloop.run(measure(ours, socket))
        process.join(DEADLINE_S)
        model = next(prepared_dir().glob("SmolLM2-135M*-float32-*"), None)
        if model is not None:
            figures |= asyncio.run(measure_workers(model, Path(folder)))
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures))
        return
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; best of {ROUNDS}, ratios: median"
    )
    for name, value in figures.items():
        print(f"{name:40} {value:9.2f}")


if __name__ == "__main__":
    main()
