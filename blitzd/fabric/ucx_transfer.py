"""One transfer, seen from each end. Everything here runs on the fabric's thread."""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from blitzd.fabric.errors import FabricError, PeerLost, SegmentError, TransferTimeout
from blitzd.fabric.segments import Bytes, Cursor, Segment, total
from blitzd.fabric.staging import Slot, SlotPool, gather, scatter
from blitzd.fabric.ucx_env import CHUNK_BYTES
from blitzd.fabric.ucx_wire import Kind, data_tag

SEND_WINDOW = 4
"""Chunks in flight to one peer: a peer that stalls holds up no more of the pool."""
RECEIVE_AHEAD = 8


@dataclass(slots=True)
class Job:
    """What the caller asked for, and how to tell it."""

    tag: int
    view: Bytes
    segments: list[Segment]
    deadline: float
    finish: Callable[[FabricError | None], None]
    """Called exactly once, on the fabric's thread; after it `view` is not touched."""
    on_bytes: Callable[[int], None] | None = None
    """Told how many of the first bytes are there, on the fabric's thread."""
    available: Callable[[], int] | None = None
    """Of a sender, asked on the fabric's thread: how many of the first bytes may leave. None:
    all."""
    chunk: int = CHUNK_BYTES
    """Bytes of one message; both ends say the same."""
    total: int = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 0 < self.chunk <= CHUNK_BYTES:
            raise ValueError(f"chunk_bytes: {self.chunk}; accepted: 1 to {CHUNK_BYTES}")
        self.total = total(self.segments)


class Line(Protocol):
    """What a transfer needs of its peer."""

    name: str
    slots_out: SlotPool
    slots_in: SlotPool
    flying: int
    """Chunks that UCX has and the socket has not, over all transfers to this peer."""

    def control(self, kind: Kind, tag: int, value: int = 0, total: int = 0) -> None: ...
    def send(self, tag: int, slot: Slot, size: int) -> Any: ...
    def send_void(self, tag: int) -> None: ...
    def receive(self, tag: int, slot: Slot) -> Any: ...
    def retire(self, request: Any, pool: SlotPool, slot: Slot) -> None: ...


class Transfer(ABC):
    """What both ends share: chunk arithmetic, and an end that is told once."""

    def __init__(self, job: Job, line: Line) -> None:
        self.job = job
        self.line = line
        self.chunks = math.ceil(job.total / job.chunk)
        self.closed = False
        """Both ends have agreed that nothing more will be said."""
        self.over = False
        """The caller has its answer."""
        self._wire_tag = data_tag(job.tag)
        self._cursor = Cursor(job.segments)

    def size(self, chunk: int) -> int:
        return min(self.job.chunk, self.job.total - chunk * self.job.chunk)

    def settle(self, error: FabricError | None) -> None:
        if not self.over:
            self.over = True
            self.job.finish(error)

    def expire(self, now: float) -> None:
        if now >= self.job.deadline:
            self.give_up(TransferTimeout(f"{self.line.name}: not done by the deadline"))

    @abstractmethod
    def give_up(self, error: FabricError) -> None:
        """Ends the transfer for the caller, and sees it to an orderly end with the peer."""

    @abstractmethod
    def lost(self, error: FabricError) -> None:
        """The line is down."""

    def told(self, count: int) -> None:
        if self.job.on_bytes is None:
            return
        try:
            self.job.on_bytes(min(count * self.job.chunk, self.job.total))
        except Exception as error:
            # The caller's fault ends the caller's transfer, not everybody's.
            self.give_up(FabricError(f"on_bytes raised {error!r}"))


class Outgoing(Transfer):
    """The sending end."""

    def __init__(self, job: Job, line: Line) -> None:
        super().__init__(job, line)
        self._granted = 0
        self._answered = 0
        """Granted chunks that were sent, or answered by a void."""
        self._flying: deque[tuple[Any, Slot]] = deque()

    def grant(self, count: int, expected: int) -> None:
        """The receiver, which expects so many bytes in all, has room for `count` chunks."""
        if expected != self.job.total:
            self.give_up(self._mismatch(expected))
        # Not cut to our count of chunks: each granted one is to be answered.
        self._granted = max(self._granted, count)
        if self.over:
            self._answer_with_voids()

    @property
    def slots(self) -> int:
        """Taken from the pool now."""
        return len(self._flying)

    def pump(self) -> bool:
        """Moves what can move; True when something did."""
        moved = False
        pool = self.line.slots_out
        while self._flying and self._flying[0][0].completed:
            request, slot = self._flying.popleft()
            pool.put(slot)
            self.line.flying -= 1
            request.check_error()
            moved = True
        while (
            not self.over
            and self._answered < self._granted
            and self.line.flying < SEND_WINDOW
            and self._is_available(self._answered)
            and (free := pool.take()) is not None
        ):
            size = self.size(self._answered)
            gather(self.job.view, self._cursor, size, free)
            self._flying.append((self.line.send(self._wire_tag, free, size), free))
            self.line.flying += 1
            self._answered += 1
            self.told(self._answered)
            moved = True
        return moved

    def _is_available(self, chunk: int) -> bool:
        job = self.job
        return job.available is None or job.available() >= min((chunk + 1) * job.chunk, job.total)

    def give_up(self, error: FabricError) -> None:
        if self.over:
            return
        self.line.control(Kind.FAIL, self.job.tag, self._answered)
        self.settle(error)
        self._answer_with_voids()

    def cancelled(self) -> None:
        """The receiver gave up."""
        self.give_up(PeerLost(f"{self.line.name} gave the transfer up"))

    def done(self, expected: int) -> None:
        """The receiver has what it expects, or has drained what it had asked for."""
        self.closed = True
        self.settle(None if expected == self.job.total else self._mismatch(expected))
        self._retire()

    def _mismatch(self, expected: int) -> SegmentError:
        return SegmentError(
            f"segments: {self.job.total} bytes, but {self.line.name} expects {expected}"
        )

    def lost(self, error: FabricError) -> None:
        self.closed = True
        self.settle(error)
        self._retire()

    def _answer_with_voids(self) -> None:
        while self._answered < self._granted:
            self.line.send_void(self._wire_tag)
            self._answered += 1

    def _retire(self) -> None:
        self.line.flying -= len(self._flying)
        for request, slot in self._flying:
            self.line.retire(request, self.line.slots_out, slot)
        self._flying.clear()


class Incoming(Transfer):
    """The receiving end."""

    def __init__(self, job: Job, line: Line) -> None:
        super().__init__(job, line)
        self._posted: deque[tuple[Any, Slot]] = deque()
        self._next_post = 0
        self._arrived = 0
        self._valid = self.chunks
        """Chunks from this one on are void: the sender gave up before them."""

    @property
    def slots(self) -> int:
        """Taken from the pool now."""
        return len(self._posted)

    def pump(self) -> bool:
        """Moves what can move; True when something did."""
        moved = False
        while self._posted and self._posted[0][0].completed:
            request, slot = self._posted.popleft()
            try:
                request.check_error()
                self._take_in(slot)
            finally:
                self.line.slots_in.put(slot)
            moved = True
        if not self.over:
            moved |= self._post()
        if self._arrived == self.chunks or (self.over and not self._posted):
            self._close()
        return moved

    def failed(self, sent: int) -> None:
        """The sender gave up after `sent` chunks."""
        self._valid = min(self._valid, sent)
        if self._arrived >= self._valid:
            self.settle(PeerLost(f"{self.line.name} gave the transfer up"))

    def give_up(self, error: FabricError) -> None:
        if self.over:
            return
        self.settle(error)
        self.line.control(Kind.CANCEL, self.job.tag)

    def lost(self, error: FabricError) -> None:
        self.closed = True
        self.settle(error)
        for request, slot in self._posted:
            self.line.retire(request, self.line.slots_in, slot)
        self._posted.clear()

    def _take_in(self, slot: Slot) -> None:
        if self._arrived >= self._valid:
            self.settle(PeerLost(f"{self.line.name} gave the transfer up"))
        elif not self.over:
            scatter(slot, self.job.view, self._cursor, self.size(self._arrived))
            self.told(self._arrived + 1)
        self._arrived += 1

    def _post(self) -> bool:
        before = self._next_post
        while self._next_post < self.chunks and len(self._posted) < RECEIVE_AHEAD:
            slot = self.line.slots_in.take()
            if slot is None:
                break
            self._posted.append((self.line.receive(self._wire_tag, slot), slot))
            self._next_post += 1
        if self._next_post == before:
            return False
        self.line.control(Kind.GRANT, self.job.tag, self._next_post, self.job.total)
        return True

    def _close(self) -> None:
        if not self.closed:
            self.closed = True
            self.line.control(Kind.DONE, self.job.tag, self._arrived, self.job.total)
            self.settle(None)
