"""One large copy, done in chunks by several threads.

Two threads move 1.5 times the bytes of one where a second core is free. Numpy lets go of the
interpreter while it copies.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from blitzd.fabric.errors import FabricError
from blitzd.fabric.segments import Bytes

CHUNK_BYTES = 2 << 20
"""Between two looks at the peer and the deadline: under a millisecond of copying."""
LANES = 2

_Pieces = list[tuple[int, int, int]]

_threads: ThreadPoolExecutor


def _start_threads() -> None:
    global _threads
    _threads = ThreadPoolExecutor(LANES, thread_name_prefix="arena-copy")


_start_threads()
# A fork takes the pool along, but not its threads: work given to it would never run.
os.register_at_fork(after_in_child=_start_threads)


def threads() -> ThreadPoolExecutor:
    """Shared by all copies of the process."""
    return _threads


class ChunkedCopy:
    """`plan` yields (source offset, target offset, length), none longer than a chunk."""

    def __init__(
        self,
        source: Bytes,
        target: Bytes,
        plan: Iterator[tuple[int, int, int]],
        trouble: Callable[[], FabricError | None],
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        """`trouble` says, before each chunk, why the copy must end."""
        self._source = source
        self._target = target
        self._plan = plan
        self._trouble = trouble
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._taken = 0
        """Bytes of the chunks given out."""
        self._finished: dict[int, int] = {}
        """First byte of a finished chunk -> its end, where an earlier one is not finished."""
        self._prefix = 0
        self._left: _Pieces = []
        self._stopped = False
        self.error: FabricError | None = None

    def stop(self) -> None:
        """No lane begins another chunk."""
        self._stopped = True

    def run(self) -> None:
        """One lane: copies chunks until none is left, or the copy has to end."""
        source, target = self._source, self._target
        while (chunk := self._next()) is not None:
            start, pieces = chunk
            end = start
            for source_offset, target_offset, length in pieces:
                target[target_offset : target_offset + length] = source[
                    source_offset : source_offset + length
                ]
                end += length
            self._finish(start, end)

    def _next(self) -> tuple[int, _Pieces] | None:
        with self._lock:
            if self.error is None:
                self.error = self._trouble()
            if self.error is not None or self._stopped:
                return None
            start, pieces, size = self._taken, self._left, sum(p[2] for p in self._left)
            self._left = []
            for piece in self._plan:
                if size + piece[2] > CHUNK_BYTES:
                    self._left = [piece]
                    break
                pieces.append(piece)
                size += piece[2]
            self._taken += size
            return (start, pieces) if pieces else None

    def _finish(self, start: int, end: int) -> None:
        with self._lock:
            self._finished[start] = end
            before = self._prefix
            while self._prefix in self._finished:
                self._prefix = self._finished.pop(self._prefix)
            if self._on_bytes is not None and self._prefix > before:
                self._on_bytes(self._prefix)
