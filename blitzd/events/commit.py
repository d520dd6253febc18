"""Group commit: one fdatasync for everybody who waits.

While a sync runs, further records gather and go with the next one, so that the number of
syncs follows the disk and not the load. A sync is due at once for a record of class ACK,
and within `group_s` for the others. Works on asyncio and on trio.
"""

from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.to_thread

from blitzd.events.errors import LogUnavailable
from blitzd.events.record import Durability, Record
from blitzd.events.writer import LogWriter

GROUP_S = 0.010
SyncRunner = Callable[[Callable[[], int]], Awaitable[int]]


class GroupCommit:
    """Use from one event loop; `run` is its only task, owned by the caller.

    `run_sync` runs the blocking sync: in a thread, or in place in virtual time.
    """

    def __init__(
        self,
        writer: LogWriter,
        *,
        group_s: float = GROUP_S,
        run_sync: SyncRunner = anyio.to_thread.run_sync,
    ) -> None:
        self._writer = writer
        self._group_s = group_s
        self._run_sync = run_sync
        self._due = anyio.Event()
        self._urgent = anyio.Event()
        self._synced = anyio.Event()
        self._failure: LogUnavailable | None = None

    def append(self, records: Sequence[Record]) -> None:
        """As `LogWriter.append`, and sees to it that a sync follows in time."""
        self._writer.append(records)
        self._due.set()
        if any(record.payload.durability is Durability.ACK for record in records):
            self._urgent.set()

    async def durable(self, seq: int) -> None:
        """Returns when record `seq` is on disk. Raises LogUnavailable when it will not be.

        Waits as long as the disk takes: the caller sets the deadline."""
        while self._writer.durable_seq < seq:
            if self._failure is not None:
                raise LogUnavailable(self._failure.state, self._failure.reason)
            self._urgent.set()
            self._due.set()
            await self._synced.wait()

    async def run(self) -> None:
        """Syncs until it is cancelled; records appended by then are the closing writer's.

        Raises LogUnavailable, after telling all who wait, when a sync fails."""
        while True:
            await self._due.wait()
            with anyio.move_on_after(self._group_s):
                await self._urgent.wait()
            self._due, self._urgent = anyio.Event(), anyio.Event()
            try:
                await self._run_sync(self._writer.sync)
            except LogUnavailable as failure:
                self._failure = failure
                raise
            finally:
                self._synced.set()
                self._synced = anyio.Event()
