"""Reading a log for the commands that fold it: where to begin, how far, with a bar for a
person who waits."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from blitzd.cli.log_points import Point
from blitzd.events import LogError, LogReader, OsDisk
from blitzd.events.record import Record
from blitzd.events.segment import segment_sizes
from blitzd.fsm import ClusterState
from blitzd.node.restore import newest_state, oldest_state

BAR_FROM_BYTES = 32 << 20
"""Below this a log is folded before a bar would be seen."""

State = TypeVar("State", bound=ClusterState)


class LogSource:
    """A log that is there now."""

    def __init__(self, directory: Path) -> None:
        """Raises LogError when `directory` has no log, and OSError."""
        self.reader = LogReader(directory)
        self.directory = self.reader.directory
        self._sizes = segment_sizes(OsDisk(), self.directory)
        if not self._sizes:
            raise LogError(f"{directory}: no log here, nor in log/ below it")
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def begin(self, into: type[State], at_most: int | None = None) -> State:
        """The state to fold from, up to a record `at_most`: empty, or the newest snapshot's
        where retention has taken the log's beginning. Raises LogError."""
        first = self.reader.first_seq
        if first == 1:
            return into()
        state = newest_state(self.directory, into, _say, at_most)
        return self._covered(state, at_most)

    def begin_early(self, into: type[State]) -> State:
        """As `begin`, with as much of the log behind it as there is."""
        first = self.reader.first_seq
        if first == 1:
            return into()
        return self._covered(oldest_state(self.directory, into, _say, first - 1), None)

    def _covered(self, state: State | None, at_most: int | None) -> State:
        first = self.reader.first_seq
        if state is not None and state.seq >= first - 1:
            return state
        reach = "" if at_most is None else f" at or before record {at_most}"
        raise LogError(
            f"{self.directory}: the log begins at record {first}, and there is no snapshot"
            f"{reach} to begin from"
        )

    def sequence(self, point: Point) -> int:
        """Raises LogError when the log begins after the point."""
        with self.bar("searching"):
            return point.sequence(r for batch in self._read(None) for r in batch)

    def batches(self, state: ClusterState, until: int | None = None) -> Iterator[list[Record]]:
        """What follows `state`, up to record `until`."""
        if until is not None and until <= state.seq:
            return
        for batch in self._read(state.seq + 1):
            if until is not None and batch[-1].seq >= until:
                yield [record for record in batch if record.seq <= until]
                return
            yield batch

    def _read(self, from_seq: int | None) -> Iterator[list[Record]]:
        with self.reader.cursor(from_seq) as cursor:
            while batch := cursor.read():
                if self._progress is not None:
                    segment, offset = cursor.place
                    behind = sum(size for seq, size in self._sizes.items() if seq < segment)
                    self._progress.update(self._task, completed=behind + offset)
                yield batch

    def records(self, state: ClusterState, until: int | None = None) -> Iterator[Record]:
        for batch in self.batches(state, until):
            yield from batch

    @contextmanager
    def bar(self, what: str) -> Iterator[None]:
        """Shows on stderr how far the reading is, when a person looks at a long log."""
        total = sum(self._sizes.values())
        console = Console(stderr=True)
        if total < BAR_FROM_BYTES or not console.is_terminal:
            yield
            return
        columns = (TextColumn(what), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as self._progress:
            self._task = self._progress.add_task(what, total=total)
            yield
        self._progress = None


def _say(notice: str) -> None:
    print(f"blitzd replay: {notice}", file=sys.stderr)
