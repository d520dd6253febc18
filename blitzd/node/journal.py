"""The node's log on disk, as the driver's `Journal`."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio.to_thread

from blitzd.events import (
    LogError,
    LogUnavailable,
    LogWriter,
    OsDisk,
    Record,
    Snapshot,
    apply_retention,
    write_snapshot,
)
from blitzd.events.snapshot import snapshot_seqs
from blitzd.node.ports import JournalUnavailable

SEGMENT_BYTES = 16 << 20
"""A start checks the segment of its snapshot from the beginning: with four times as much it
takes three times as long."""
SNAPSHOTS_KEPT = 32
"""The log reaches back to the oldest of them: some millions of records, or as many starts."""


class FileJournal:
    def __init__(
        self, writer: LogWriter, directory: Path, snapshots_kept: int = SNAPSHOTS_KEPT
    ) -> None:
        """`directory` is the one that `writer` writes in."""
        self._writer = writer
        self._directory = directory
        self._snapshots_kept = snapshots_kept
        # A thread that waits for nothing else: a sync starts a quarter sooner on it.
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="log-sync")
        self._snapshot_seq = max(snapshot_seqs(OsDisk(), directory), default=0)

    def append(self, records: Sequence[Record]) -> None:
        try:
            status = self._writer.status()
            if status.state == "full":
                self._writer.try_resume()
                status = self._writer.status()
            if status.state != "open":
                raise LogUnavailable(status.state, status.reason)
            self._writer.append(records)
        except LogError as error:
            raise JournalUnavailable(str(error)) from error

    async def sync(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._syncer, self._writer.sync)
        except LogUnavailable as error:
            raise JournalUnavailable(str(error)) from error

    @property
    def snapshot_seq(self) -> int:
        return self._snapshot_seq

    async def snapshot(self, snapshot: Snapshot) -> None:
        try:
            await anyio.to_thread.run_sync(self._keep, snapshot)
        except (LogError, OSError) as error:
            raise JournalUnavailable(str(error)) from error
        self._snapshot_seq = snapshot.seq

    def _keep(self, snapshot: Snapshot) -> None:
        # A snapshot of what is not on disk would be taken as proof of loss.
        if self._writer.sync() < snapshot.seq:
            raise LogError(f"record {snapshot.seq} is not in the log yet")
        write_snapshot(self._directory, snapshot)
        apply_retention(self._directory, self._snapshots_kept)
