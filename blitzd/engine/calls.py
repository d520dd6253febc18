"""What every call to the service goes through: its deadline noted, its errors given a
status that says what happened."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import structlog
from grpclib.const import Status
from grpclib.events import RecvRequest
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.errors import as_status

log = structlog.get_logger()

MARGIN = 0.1
"""Of the caller's time that is kept for the answer: past its deadline it would only hear
that the deadline passed, not what we were waiting for."""

_remaining_s: ContextVar[float | None] = ContextVar("remaining_s", default=None)


def deadline(at_most_s: float) -> float:
    """When the call that is being served must be answered, in `time.monotonic()`."""
    remaining = _remaining_s.get()
    if remaining is None:
        return time.monotonic() + at_most_s
    return time.monotonic() + min(at_most_s, remaining * (1 - MARGIN))


async def to_the_end(work: Callable[[list[int]], None], blocks: list[int]) -> None:
    """Runs `work(blocks)` on a thread. A caller that is cancelled still waits for its end:
    after that the blocks may be another's."""
    done = asyncio.ensure_future(asyncio.to_thread(work, blocks))
    try:
        await asyncio.shield(done)
    finally:
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])


async def guard(event: RecvRequest) -> None:
    """A listener for the server's RecvRequest."""
    served = event.method_func
    if event.deadline is not None:
        _remaining_s.set(event.deadline.time_remaining())

    async def guarded(stream: Any) -> None:
        try:
            await served(stream)
        except (GRPCError, StreamTerminatedError):
            raise
        except Exception as error:
            status = as_status(error)
            if status.status is Status.INTERNAL:
                log.exception("call failed", method=event.method_name)
            raise status from error

    event.method_func = guarded
