"""New, Old and a source of weights, for `bench_zigzag`: three hosts whose links are limited, or,
where namespaces cannot be had, one host and a source that keeps to the link's times."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from blitzd.engine.layout import read_model_file
from blitzd.engine.prepare import build
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched.zigzag import Policy
from tests.engine.test_live_pairs import Gate
from tests.engine.workers import ANSWER_S, Client, Zygote, zygote
from tests.hosts.netns import Hosts, hosts, why_not
from tests.tiny import RandomSource, tiny_config

SHAPE = {
    "layers": 12,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "ffn": 768,
    "vocab": 9216,
}
"""The embedding is as large as three layers: more than an 8B model's, less than a small one's."""
LAYERS = SHAPE["layers"]
LAYER_S = 0.040
LOAD = 6.0
"""What a layer takes to arrive, in executions of one."""
PAYLOAD = 1448 / 1514
"""Of a TCP packet on Ethernet."""
BLOCKS = 256
ORPHAN_S = 3600.0
OLD, NEW, SOURCE = range(3)
"""Numbers of hosts."""


class Source(RandomSource):
    """Its tokenizer knows all ids of the vocabulary."""

    def write_tokenizer(self, directory: Path) -> None:
        super().write_tokenizer(directory)
        path = directory / "tokenizer.json"
        document = msgspec.json.decode(path.read_bytes())
        known = document["model"]["vocab"]
        known |= {f"<{number}>": number for number in range(len(known), SHAPE["vocab"])}
        path.write_bytes(msgspec.json.encode(document))


class Watched(Client):
    """Calls `reported` with each report."""

    reported: Callable[[pb.StepReport], None] = staticmethod(lambda report: None)

    def take(self, report: pb.StepReport) -> None:
        super().take(report)
        self.reported(report)


class Weights(Protocol):
    """Where New's weights come from."""

    def open(self) -> contextlib.AbstractAsyncContextManager[pb.WeightPeer]:
        """For one load."""


@dataclass
class Linked:
    """Another host's worker, over a link that lets a layer by in `LOAD` executions of one."""

    worker: Client

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[pb.WeightPeer]:
        yield _peer(self.worker.replica, self.worker.epoch, self.worker.process.socket)


@dataclass
class Paced:
    """This process, which lets a layer go when a link would have brought it."""

    model: Path
    directory: Path

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[pb.WeightPeer]:
        layout = read_model_file(self.model).layout
        layer = layout.sections[1].length
        began = time.monotonic()

        async def pace(gate: Gate) -> None:
            for index, section in enumerate(layout.sections[:-1]):
                due = began + (section.offset + section.length) / layer * LOAD * LAYER_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                gate.allow(index)

        async with Gate(self.model, self.directory) as gate:
            pacing = asyncio.create_task(pace(gate))
            try:
                yield _peer("gate", 1, gate.path)
            finally:
                pacing.cancel()


def _peer(replica: str, epoch: int, socket: Path) -> pb.WeightPeer:
    return pb.WeightPeer(replica_id=replica, epoch=epoch, endpoint=str(socket))


@dataclass
class World:
    zygotes: Zygote
    model: Path
    hollow: Path
    """The model without its weights."""
    hosts: Hosts | None
    weights: Weights
    pairs: dict[Policy, tuple[Watched, Watched]] = field(default_factory=dict)
    """(New, Old). A pair for each policy: they differ in their workers' options, and one that
    has nothing to do costs nothing."""

    @property
    def transport(self) -> pb.Transport:
        return pb.Transport.UCX if self.hosts is not None else pb.Transport.MAP

    async def add(self, policy: Policy) -> None:
        options: dict[str, object] = {"pace_layer_ms": LAYER_S * 1e3}
        if policy is Policy.STOP_THE_WORLD:
            # Two may then be there, and run one after the other: no pause between them.
            options["max_batch_size"] = 1
        else:
            options["live_policy"] = policy.value
        old = await self._start(f"old-{policy}", OLD, options)
        await old.load_model(self.model, BLOCKS)
        await old.watch()
        new = await self._start(f"new-{policy}", NEW, options)
        await new.watch()
        self.pairs[policy] = (new, old)

    async def _start(self, name: str, host: int, options: dict[str, object]) -> Watched:
        return await start(self.zygotes, self.hosts, name, host, options)

    def steps(self, client: Client) -> list[list[int]]:
        """What it ran, as the zygote's `record_steps` has it."""
        path = self.zygotes.directory / f"{client.replica}.steps"
        return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]

    async def close(self) -> None:
        for pair in self.pairs.values():
            for client in pair:
                await client.close()

    @property
    def cpu_s(self) -> float:
        """Of this process and all workers."""
        ticks = 0
        for pid in (os.getpid(), *(process.pid for process in self.zygotes.started)):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


async def start(
    zygotes: Zygote, joined: Hosts | None, name: str, host: int, options: dict[str, object]
) -> Watched:
    where = {} if joined is None else {"namespace": joined.name(host)}
    steps = str(zygotes.directory / f"{name}.steps")
    process = zygotes.start(name, replica=options, orphan_timeout_s=ORPHAN_S, steps=steps, **where)
    return await Watched.connect(name, zygotes.epochs[name], process)


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, hollow = scratch / "model", scratch / "hollow"
        build(Source(tiny_config("float32", **SHAPE)), "float32", model)
        shutil.copytree(model, hollow, ignore=shutil.ignore_patterns("arena.bin"))
        joined = stack.enter_context(_hosts(model))
        zygotes = stack.enter_context(zygote(scratch))
        weights: Weights = Paced(model, scratch)
        if joined is not None:
            source = await start(zygotes, joined, "source", SOURCE, {})
            await source.load_model(model, 1)
            weights = Linked(source)
        made = World(zygotes, model, hollow, joined, weights)
        try:
            yield made
        finally:
            await made.close()
            if joined is not None:
                await source.close()


@contextlib.contextmanager
def _hosts(model: Path) -> Iterator[Hosts | None]:
    if reason := why_not():
        print(f"no hosts ({reason}): the source of the weights keeps to the link's times")
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        yield None
        return
    layer = read_model_file(model).layout.sections[1].length
    rate_mbit = 8 * layer / (LOAD * LAYER_S) / PAYLOAD / 1e6
    with hosts(3, rate_mbit) as joined:
        print(f"three hosts, links of {rate_mbit:.1f} Mbit/s, layers of {layer / 1e6:.2f} MB")
        yield joined


async def unload(client: Client) -> None:
    await client.stub.reset(pb.ResetRequest(unload_weights=True), timeout=ANSWER_S)
