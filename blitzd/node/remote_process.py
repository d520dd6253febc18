"""A worker's process on another node, reached by way of its agent."""

import asyncio
import contextlib
import signal
from collections.abc import Callable

from blitzd.proto.blitzd.node import v1 as pb

ANSWER_S = 2.0
"""Beyond the worker's own grace, for its agent to say that it has ended."""


class RemoteProcess:
    """`on_exit` is called once: when the agent says so, or cannot be asked."""

    def __init__(
        self,
        send: Callable[[pb.ControllerMessage], bool],
        replica: str,
        epoch: int,
        on_exit: Callable[[str], None],
    ) -> None:
        """`send` says whether the agent is there to be told."""
        self.pid = 0
        """There. 0: not known yet."""
        self._send = send
        self._on = (replica, epoch)
        self._on_exit = on_exit
        self._exited = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """An agent that is out of contact does not hear of it. Its next hello does not have
        this worker, which is its end; or there is none, and the node is lost."""
        replica, epoch = self._on
        self._send(pb.ControllerMessage(spawn=pb.Spawn(replica_id=replica, epoch=epoch)))

    def ended(self, how: str) -> None:
        if self.alive:
            self._exited.set()
            self._on_exit(how)

    @property
    def alive(self) -> bool:
        return not self._exited.is_set()

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL alone is passed on. It is obeyed as far as we are concerned, as `end` is: who
        is killed is of no use any more, and what ran there need not wait for the node's lease."""
        if number is signal.SIGKILL and self.alive and self._killing is None:
            self._killing = asyncio.ensure_future(self.end(0.0))

    async def end(self, grace_s: float) -> None:
        """Also when the agent does not answer: what it then still has it is told not to keep."""
        how = "its node is out of contact"
        if self.alive and self._tell(grace_s):
            how = "its node does not answer"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s + ANSWER_S):
                    await self._exited.wait()
        self.ended(how)

    def _tell(self, grace_s: float) -> bool:
        replica, epoch = self._on
        end = pb.End(replica_id=replica, epoch=epoch, grace_ms=round(grace_s * 1e3))
        return self._send(pb.ControllerMessage(end=end))
