"""The workers that an agent has running: started, found again, ended."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import structlog
from grpclib.client import Channel

from blitzd.node.agent_journal import AgentJournal, Known
from blitzd.node.config import NodeConfig
from blitzd.node.starter import NotStarted, Starter
from blitzd.node.worker_calls import CallFailed, describe_failure
from blitzd.node.worker_process import WorkerProcess
from blitzd.proto.blitzd.engine import v1 as pb

Key = tuple[str, int]
"""(replica, epoch)."""

log = structlog.get_logger()


@dataclass(eq=False)
class Running:
    process: WorkerProcess | None = None
    """None: it is being started."""
    known: Known | None = None
    """Once it answers."""
    unwanted: bool = False
    """It was ended before it was there."""
    why: str = ""


class AgentWorkers:
    def __init__(
        self,
        config: NodeConfig,
        runtime_dir: Path,
        journal: AgentJournal,
        started: Callable[[Known], None],
        exited: Callable[[str, int, str], None],
    ) -> None:
        """`started` and `exited` are told of each worker, in the event loop."""
        self._start_s = config.start_deadline_s
        self._journal = journal
        self._starter = Starter(config, runtime_dir)
        self._started = started
        self._exited = exited
        self._running: dict[Key, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> list[Known]:
        """Those that answer, or did."""
        return [running.known for running in self._running.values() if running.known]

    def adopt(self) -> None:
        """Takes over what the last start of this agent left and what is still as it would be
        started now; ends the rest."""
        for known in self._journal.workers:
            on = (known.replica, known.epoch)
            running = self._running[on] = Running(known=known)
            process = self._starter.adopt(*on, known.pid, self._exit_of(on))
            if process is None or not self._starter.is_worker(*on, known.pid):
                self._gone(on)
                continue
            running.process = process
            if not self._starter.started_as_now(*on, known.pid):
                self.end(*on, grace_s=0.0)

    def spawn(self, replica: str, epoch: int) -> None:
        key = (replica, epoch)
        if key not in self._running:
            self._running[key] = Running()
            self._background(self._start(key))

    async def _start(self, key: Key) -> None:
        exited = self._exit_of(key)
        running = self._running[key]
        try:
            running.process = await self._starter.start(*key, exited)
        except NotStarted as error:
            exited(f"could not be started: {error}")
            return
        if running.unwanted:
            await running.process.end(0.0)
            return
        try:
            described = await self._describe(key)
            known = Known(*key, running.process.pid, described.endpoint)
        except CallFailed as error:
            running.why = f"did not come up: {describe_failure(error)}"
            await running.process.end(0.0)
            return
        if self._running.get(key) is running:
            running.known = known
            self._journal.add(known)
            self._started(known)

    async def _describe(self, key: Key) -> pb.DescribeReply:
        socket = self._starter.socket(*key)
        async with asyncio.timeout(self._start_s):
            while not socket.exists():
                if key not in self._running:
                    raise ConnectionError("it has ended")
                await asyncio.sleep(0.01)
            async with Channel(path=str(socket)) as channel:
                return await pb.EngineStub(channel).describe(pb.DescribeRequest())

    def end(self, replica: str, epoch: int, grace_s: float) -> None:
        """One that is not there has ended, which is told as well."""
        running = self._running.get((replica, epoch))
        if running is None:
            self._exited(replica, epoch, "was not there any more")
        elif running.process is None:
            running.unwanted = True
        else:
            self._background(running.process.end(grace_s))

    async def end_all_but(self, kept: Collection[Key]) -> None:
        """At once. Returns when they are gone."""
        others = [key for key in self._running if key not in kept]
        for key in others:
            self.end(*key, grace_s=0.0)
        while any(key in self._running for key in others):  # noqa: ASYNC110 - processes end soon
            await asyncio.sleep(0.005)

    def _exit_of(self, key: Key) -> Callable[[str], None]:
        def exited(how: str) -> None:
            running = self._running.get(key)
            why = running.why if running is not None else ""
            self._gone(key)
            reason = f"{how} ({why})" if why else how
            log.info("worker ended", replica=key[0], epoch=key[1], how=reason)
            self._exited(*key, reason)

        return exited

    def _gone(self, key: Key) -> None:
        self._running.pop(key, None)
        self._starter.clear(*key)
        self._journal.remove(*key)
        self._background(self._starter.forget(*key))

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
