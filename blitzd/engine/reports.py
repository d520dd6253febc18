"""From the step loop to the one watcher: a bounded queue that never drops in silence."""

import asyncio
from collections.abc import AsyncGenerator

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from blitzd.proto.blitzd.engine import v1 as pb

BACKLOG = 1024
"""Reports that a slow watcher may be behind: seconds of steps."""


class Reports:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[pb.StepReport | GRPCError] | None = None

    @property
    def watched(self) -> bool:
        return self._queue is not None

    def publish(self, report: pb.StepReport) -> None:
        """Without a watcher the report is gone: who wants tokens watches first."""
        queue = self._queue
        if queue is None:
            return
        if queue.qsize() >= BACKLOG:
            reason = f"watcher is {BACKLOG} reports behind; its tokens are lost"
            self._end(GRPCError(Status.RESOURCE_EXHAUSTED, reason))
            return
        queue.put_nowait(report)

    async def watch(self, first: pb.StepReport) -> AsyncGenerator[pb.StepReport]:
        """`first`, then all that is published, until another watcher comes."""
        self._end(GRPCError(Status.ABORTED, "another watcher took over"))
        queue: asyncio.Queue[pb.StepReport | GRPCError] = asyncio.Queue()
        self._queue = queue
        try:
            yield first
            while True:
                report = await queue.get()
                if isinstance(report, GRPCError):
                    raise report
                yield report
        finally:
            if self._queue is queue:
                self._queue = None

    def _end(self, error: GRPCError) -> None:
        if self._queue is not None:
            self._queue.put_nowait(error)
            self._queue = None
