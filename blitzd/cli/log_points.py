"""Moments of a log as people name them: a sequence, a time, seconds after its start."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, Self

from blitzd.events import LogError
from blitzd.events.record import Record
from blitzd.fsm.timeline import Timeline

ACCEPTED = (
    "a sequence (120), a time with its zone (2026-03-01T12:00:00Z), or seconds after the first"
    " record (12.5s)"
)
_SEQUENCE = re.compile(r"\d{1,19}")
_SECONDS = re.compile(r"(\d{1,10})(?:\.(\d{1,9}))?s")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Point:
    kind: Literal["seq", "wall_us", "since_ns"]
    value: int
    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, saying what is accepted."""
        if _SEQUENCE.fullmatch(text):
            return cls("seq", int(text), text)
        if seconds := _SECONDS.fullmatch(text):
            fraction = (seconds[2] or "").ljust(9, "0")
            return cls("since_ns", int(seconds[1]) * 10**9 + int(fraction), text)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise ValueError(f"{text!r} is no point of a log; accepted: {ACCEPTED}")
        return cls("wall_us", (moment - _EPOCH) // timedelta(microseconds=1), text)

    def sequence(self, records: Iterable[Record]) -> int:
        """Of the last of `records`, a whole log, at or before it. Times are compared in
        microseconds, as they are printed; where the wall clock jumps, the first record after
        the point ends the search.

        Raises LogError when the log begins after it.
        """
        if self.kind == "seq":
            return self.value
        timeline, last = Timeline(), 0
        for record in records:
            if self._is_before(record, timeline.at(record)):
                break
            last = record.seq
        if not last:
            raise LogError(f"no record is as old as {self.text}")
        return last

    def _is_before(self, record: Record, since_ns: int) -> bool:
        if self.kind == "since_ns":
            return self.value < since_ns
        return self.value < record.wall_ns // 1000
