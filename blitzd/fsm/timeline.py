"""One time axis through a log with several boots.

Within a boot the core's clock measures; it starts anew with each. Between boots only the
wall clock knows how long the daemon was away, and where that jumped backwards the gap
counts as nothing.
"""

from blitzd.events.record import Record
from blitzd.events.types import Booted


class Timeline:
    """Give it every record in order, from any one on."""

    def __init__(self) -> None:
        self.now_ns = 0
        """Of the last record, since the first one seen."""
        self._mono_ns: int | None = None
        self._wall_ns = 0

    def at(self, record: Record) -> int:
        """Nanoseconds between the first record seen and this one. Never decreases."""
        if self._mono_ns is not None:
            if type(record.payload) is Booted:
                gap = record.wall_ns - self._wall_ns
            else:
                gap = record.mono_ns - self._mono_ns
            self.now_ns += max(0, gap)
        self._mono_ns, self._wall_ns = record.mono_ns, record.wall_ns
        return self.now_ns
