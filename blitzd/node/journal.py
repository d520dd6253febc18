"""The node's log on disk, as the driver's `Journal`."""

from collections.abc import Sequence

import anyio.to_thread

from blitzd.events import LogError, LogUnavailable, LogWriter, Record
from blitzd.node.ports import JournalUnavailable


class FileJournal:
    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def append(self, records: Sequence[Record]) -> None:
        try:
            if self._writer.status().state == "full":
                self._writer.try_resume()
            self._writer.append(records)
        except LogError as error:
            raise JournalUnavailable(str(error)) from error

    async def sync(self) -> None:
        try:
            await anyio.to_thread.run_sync(self._writer.sync)
        except LogUnavailable as error:
            raise JournalUnavailable(str(error)) from error
