"""Bytes between workers of different nodes, over UCX.

A thread of its own drives UCX: it sleeps until a descriptor wakes it (UCX is armed, not
polled), so idling costs nothing, a large transfer does not hold up the caller's event loop,
and any asyncio loop will do.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from blitzd.fabric.errors import FabricError
from blitzd.fabric.identity import Identity
from blitzd.fabric.segments import Bytes, Segment, as_bytes, checked, refuse_overlap, total
from blitzd.fabric.ucx_env import CHUNK_BYTES
from blitzd.fabric.ucx_thread import UcxThread
from blitzd.fabric.ucx_transfer import Job
from blitzd.fabric.ucx_wire import Address, data_tag, draw_tag

STUCK_S = 5.0
"""After a deadline, which the fabric's thread keeps: it must be stuck in a call."""


class UcxFabric:
    """One a process. `identity` is this worker's name and epoch, `r0/3`.

    A hand-over: the receiving worker draws `new_tag()` and sends it with its `address` to
    the source; the source starts `send` to that address, then answers with its own
    `address`; the receiver calls `receive` from it. Each side connects to the other, so
    each learns at once when the other dies, and within half a second when it stalls.
    """

    def __init__(self, identity: str) -> None:
        self.identity = Identity.parse(identity)
        self._thread: UcxThread | None = None
        self._starting: asyncio.Task[UcxThread] | None = None

    async def start(self) -> None:
        """Loads UCX and starts the thread. Idempotent; `send` and `receive` call it."""
        if self._thread is not None:
            return
        if self._starting is None:
            self._starting = asyncio.create_task(asyncio.to_thread(UcxThread, self.identity))
        self._thread = await asyncio.shield(self._starting)

    @property
    def address(self) -> bytes:
        """Where peers reach this fabric, its identity and epoch included.

        Raises FabricError before `start`.
        """
        if self._thread is None:
            raise FabricError(f"the fabric of {self.identity} was not started")
        return self._thread.address

    @property
    def held_buffers(self) -> int:
        """Buffers of ended transfers that UCX has yet to let go of: 0 but for moments."""
        return 0 if self._thread is None else self._thread.held

    @property
    def peers(self) -> tuple[str, ...]:
        """Identities that an endpoint leads to."""
        return () if self._thread is None else self._thread.peers

    @staticmethod
    def new_tag() -> int:
        """A name for one transfer. Drawn by the receiver."""
        return draw_tag()

    async def send(
        self,
        peer_address: bytes,
        tag: int,
        buffer: object,
        segments: Sequence[Segment],
        deadline: float,
        on_bytes: Callable[[int], None] | None = None,
        available: Callable[[], int] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> int:
        """Sends `segments` of `buffer`; returns their bytes once the peer has them all.

        `deadline` is a time of `time.monotonic()`; `on_bytes` is told on the fabric's thread
        how many of the first bytes have left. `available`, asked on that thread, says how
        many of the first bytes may leave by now: those that a `receive` of this fabric
        brings are forwarded at once, others within 50 ms. `chunk_bytes`, those of one message,
        are the same at both ends. Raises SegmentError, ValueError for a bad address, tag or
        chunk, IdentityMismatch when the peer's epoch is an old one, PeerLost, TransferTimeout.
        """
        view = as_bytes(buffer, writable=False, name="buffer")
        return await self._transfer(
            UcxThread.send,
            peer_address,
            tag,
            view,
            checked(segments, len(view), "segments"),
            deadline,
            on_bytes,
            available,
            chunk_bytes,
        )

    async def receive(
        self,
        peer_address: bytes,
        tag: int,
        buffer: object,
        segments: Sequence[Segment],
        deadline: float,
        on_bytes: Callable[[int], None] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> int:
        """Receives onto `segments` of `buffer`; returns their bytes.

        The peer must send as many. `on_bytes` is told on the fabric's thread how many of
        the first bytes are there. Raises as `send` does; once it has raised, or was
        cancelled, `buffer` is not written any more.
        """
        view = as_bytes(buffer, writable=True, name="buffer")
        targets = checked(segments, len(view), "segments")
        refuse_overlap(targets, "segments")
        return await self._transfer(
            UcxThread.receive,
            peer_address,
            tag,
            view,
            targets,
            deadline,
            on_bytes,
            None,
            chunk_bytes,
        )

    async def _transfer(
        self,
        start: Callable[[UcxThread, Address, Job], None],
        peer_address: bytes,
        tag: int,
        view: Bytes,
        segments: list[Segment],
        deadline: float,
        on_bytes: Callable[[int], None] | None,
        available: Callable[[], int] | None,
        chunk_bytes: int,
    ) -> int:
        address = Address.decode(peer_address)
        data_tag(tag)
        await self.start()
        assert self._thread is not None

        def job(finish: Callable[[FabricError | None], None]) -> Job:
            return Job(tag, view, segments, deadline, finish, on_bytes, available, chunk_bytes)

        error = await _run(self._thread, start, address, job)
        if error is None:
            return total(segments)
        try:
            raise error
        finally:
            # Its traceback holds this frame, which would hold it, and the caller's buffer,
            # until the next cycle collection.
            del error

    async def close(self) -> None:
        """Ends every transfer with PeerLost, here and at the peers, and the thread.

        Idempotent. The fabric cannot be started again.
        """
        if self._starting is None:
            return
        await asyncio.wait([self._starting])
        if self._starting.exception() is None:
            await asyncio.to_thread(self._starting.result().stop)


async def _run(
    thread: UcxThread,
    start: Callable[[UcxThread, Address, Job], None],
    address: Address,
    make: Callable[[Callable[[FabricError | None], None]], Job],
) -> FabricError | None:
    """Returns when the thread is done with the buffer, also when cancelled."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[FabricError | None] = loop.create_future()

    def finish(error: FabricError | None) -> None:
        # A loop that was closed meanwhile has nobody waiting.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set_result, error)

    job = make(finish)
    limit = job.deadline + STUCK_S
    start(thread, address, job)
    try:
        await asyncio.wait([done], timeout=max(0.0, limit - time.monotonic()))
    except asyncio.CancelledError:
        thread.give_up(address, job.tag)
        while not done.done() and time.monotonic() < limit:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done], timeout=STUCK_S)
        raise
    if not done.done():
        return FabricError(
            f"the fabric's thread has not answered for {STUCK_S} s: the buffer may be in use"
        )
    return done.result()
