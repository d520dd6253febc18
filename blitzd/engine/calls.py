"""What every call to the service goes through: its deadline noted, its errors given a
status that says what happened."""

import time
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
