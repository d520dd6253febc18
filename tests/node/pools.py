"""A worker pool with real processes on a tiny model, and no driver: what it reports is kept."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.node.config import NodeConfig
from blitzd.node.face import GenerateRequest
from blitzd.node.live import LiveRequest
from blitzd.node.paths import runtime_dir
from blitzd.node.workers import Worker, WorkerPool
from blitzd.proto.blitzd.engine import v1 as pb
from tests.tiny import make_tiny

START_S = 60.0

P = TypeVar("P", bound=Payload)


class Kept:
    """What a driver would be told."""

    def __init__(self) -> None:
        self.posted: list[Payload] = []
        self.tokens: list[int] = []
        self._changed = asyncio.Condition()

    async def post(self, payload: Payload) -> None:
        async with self._changed:
            self.posted.append(payload)
            self._changed.notify_all()

    async def deliver(self, replica: str, epoch: int, report: pb.StepReport) -> None:
        async with self._changed:
            self.tokens += report.token_ids
            self._changed.notify_all()

    async def first(self, kind: type[P], timeout_s: float = START_S) -> P:
        await self.until(lambda: any(isinstance(p, kind) for p in self.posted), timeout_s)
        return next(p for p in self.posted if isinstance(p, kind))

    async def until(self, check: Callable[[], bool], timeout_s: float = START_S) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(check)


async def nothing(request_id: int) -> None:
    pass


class Pool:
    """One worker, r0/1, with a model."""

    def __init__(self, directory: Path, **options: Any) -> None:
        model = make_tiny(directory / "model")
        state_dir = directory / "state"
        state_dir.mkdir()
        self.config = NodeConfig(state_dir, model, "tiny", kv_blocks=16, **options)
        self.kept = Kept()
        self.pool = WorkerPool(self.config, runtime_dir(state_dir), self.kept)

    @property
    def worker(self) -> Worker:
        return self.pool._workers["r0", 1]

    @property
    def pid(self) -> int:
        assert self.worker.process is not None
        return self.worker.process.pid

    async def start(self, load: bool = True) -> None:
        self.pool.perform(cmd.SpawnWorker("r0", 1), None)
        await self.kept.first(ev.WorkerDescribed)
        if load:
            self.pool.perform(cmd.LoadModel("r0", 1), None)
            loaded = await self.kept.first(ev.LoadEnded)
            assert not loaded.reason

    def generate(self, tokens: int) -> None:
        request = GenerateRequest((1, 2, 3), tokens, ignore_eos=True)
        live = LiveRequest(1, request, 0, nothing)
        self.pool.perform(cmd.StartPrefill("r0", 1, 1, hold=False), live)


@asynccontextmanager
async def pool(directory: Path, *, load: bool = True, **options: Any) -> AsyncIterator[Pool]:
    one = Pool(directory, **options)
    try:
        await one.start(load)
        yield one
    finally:
        await one.pool.close()
        runtime_dir(one.config.state_dir).rmdir()
