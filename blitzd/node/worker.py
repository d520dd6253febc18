"""One worker as the daemon sees it, wherever its process runs."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
from grpclib.client import Channel

from blitzd.node.config import NodeConfig
from blitzd.node.health_watch import HealthWatch
from blitzd.node.worker_calls import CALL_MARGIN_S, Reports, WorkerCalls
from blitzd.proto.blitzd.engine import v1 as pb

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Home:
    """Where a worker runs, and what it finds there."""

    node: str
    """Of the agent that starts it; empty: this node."""
    model_path: str
    kv_blocks: int


class Process(Protocol):
    """A worker's process: on this machine, or on another by way of its agent."""

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def signal(self, number: signal.Signals) -> None: ...

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL when that was not enough within `grace_s`."""


class Worker:
    """One epoch of one replica: its process, its channel, its tasks."""

    calls: WorkerCalls
    health: HealthWatch
    stub: pb.EngineStub

    def __init__(
        self, replica: str, epoch: int, home: Home, reports: Reports, config: NodeConfig
    ) -> None:
        self.replica = replica
        self.epoch = epoch
        self.home = home
        self.endpoint = ""
        """Where other nodes reach it."""
        self.process: Process | None = None
        self._channel: Channel | None = None
        self._reports = reports
        self._config = config
        self.call_s = config.hang_deadline_s + CALL_MARGIN_S
        self.tasks: set[asyncio.Task[None]] = set()
        self.watched = asyncio.Event()
        """Its token stream is read. Requests wait for that: tokens nobody reads are gone."""
        self.told_to_end = False
        """Its streams break then, and that is no reason to kill it."""
        self.ending = False
        """Nobody wants to hear of its exit."""
        self.why = ""
        """Why we ended it, if it was us."""

    def connect(self, channel: Channel) -> None:
        """Before any call to it."""
        config = self._config
        self._channel = channel
        self.stub = pb.EngineStub(channel)
        on = (self.replica, self.epoch)
        self.calls = WorkerCalls(*on, self.stub, self._reports, self.call_s)
        self.health = HealthWatch(self.calls.health, config.hang_deadline_s, config.step_deadline_s)

    @property
    def connected(self) -> bool:
        return self._channel is not None

    def start_request(self, work: Callable[[], Awaitable[None]]) -> None:
        async def when_watched() -> None:
            try:
                async with asyncio.timeout(self._config.start_deadline_s):
                    await self.watched.wait()
            except TimeoutError:
                self.give_up("its token stream did not begin")
            else:
                await work()

        self.start(when_watched())

    def start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a worker's task failed", replica=self.replica, exc_info=task.exception())

    def give_up(self, why: str) -> None:
        """Kills what does not answer; its exit then takes the usual way."""
        if self.told_to_end or self.process is None or not self.process.alive:
            return
        self.why = self.why or why
        self.process.signal(signal.SIGKILL)

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        if self._channel is not None:
            self._channel.close()
