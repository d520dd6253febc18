"""Which bytes of an arena are there, and who brought them. No torch here."""

import threading
from typing import NamedTuple

Range = tuple[int, int]
"""[start, end) in bytes."""


class _Run(NamedTuple):
    start: int
    end: int
    owner: str


class Coverage:
    """Disjoint runs of bytes, each of one owner. May be used from any thread.

    There are few, so each look walks them: one for each peer and range of a load.
    """

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._lock = threading.Lock()

    def add(self, start: int, end: int, owner: str) -> None:
        """[start, end) are there now, of this owner."""
        if start < end:
            with self._lock:
                self._runs = _joined([*_without(self._runs, start, end), _Run(start, end, owner)])

    def discard(self, start: int, end: int) -> None:
        """[start, end) are not there any more."""
        if start < end:
            with self._lock:
                self._runs = _without(self._runs, start, end)

    # `_runs` is replaced, never changed: whoever looks sees one state of it.

    def reach(self, start: int) -> int:
        """The end of what is there from `start` on without a gap; `start`: nothing is."""
        for run in self._runs:
            if run.start <= start < run.end:
                start = run.end
        return start

    def missing(self, start: int, end: int) -> list[Range]:
        """The gaps in [start, end), in order."""
        gaps = []
        for run in self._runs:
            if run.end <= start:
                continue
            if run.start >= end:
                break
            if run.start > start:
                gaps.append((start, run.start))
            start = run.end
        if start < end:
            gaps.append((start, end))
        return gaps

    def owners(self, start: int, end: int) -> set[str]:
        """Of the bytes of [start, end) that are there."""
        return {r.owner for r in self._runs if max(r.start, start) < min(r.end, end)}

    def total(self) -> int:
        return sum(run.end - run.start for run in self._runs)


def _without(runs: list[_Run], start: int, end: int) -> list[_Run]:
    left = []
    for run in runs:
        if run.start < start:
            left.append(run._replace(end=min(run.end, start)))
        if run.end > end:
            left.append(run._replace(start=max(run.start, end)))
    return [run for run in left if run.start < run.end]


def _joined(runs: list[_Run]) -> list[_Run]:
    joined: list[_Run] = []
    for run in sorted(runs):
        last = joined[-1] if joined else None
        if last is not None and last.end == run.start and last.owner == run.owner:
            joined[-1] = last._replace(end=run.end)
        else:
            joined.append(run)
    return joined


def shards(size: int, count: int, alignment: int) -> list[Range]:
    """[0, size) in `count` contiguous ranges of equal length, a multiple of `alignment`, but
    for the last, which has the rest beside: an all-gather is one of equal parts."""
    length = size // count // alignment * alignment
    starts = [length * index for index in range(count)]
    return list(zip(starts, [*starts[1:], size], strict=True))
