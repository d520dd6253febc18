"""What the driver needs of the world. The real parts and the virtual ones both have this
shape, so that the driver itself runs unchanged under a mock clock."""

from collections.abc import Sequence
from typing import Protocol

from blitzd.control.commands import Command
from blitzd.events.record import Record
from blitzd.events.snapshot import Snapshot
from blitzd.node.live import LiveRequest


class JournalUnavailable(Exception):
    """The log takes no more records for now (disk full, I/O error). The message says why."""


class Clock(Protocol):
    def mono_ns(self) -> int: ...

    def wall_ns(self) -> int: ...


class Journal(Protocol):
    def append(self, records: Sequence[Record]) -> None:
        """Hands the records to the operating system, in order. Raises JournalUnavailable,
        and then none of them is in the log. With no records it only says whether the log
        would take some."""

    async def sync(self) -> None:
        """Returns when all that was appended before is on disk. Raises JournalUnavailable."""

    @property
    def snapshot_seq(self) -> int:
        """Of the newest snapshot; 0: there is none."""

    async def snapshot(self, snapshot: Snapshot) -> None:
        """Keeps the state at a record that was appended, so that the next start need not read
        what came before. Raises JournalUnavailable, and then nothing has changed."""


class Workers(Protocol):
    def perform(self, command: Command, live: LiveRequest | None) -> None:
        """Begins to carry out `command` and returns at once; results come back as inputs.
        `live` is the request it is about, unless that has ended."""
