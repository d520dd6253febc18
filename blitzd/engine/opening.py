"""A replica is opened on a thread, since that takes long. No torch at import."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from blitzd.engine.options import ReplicaOptions
from blitzd.engine.prepared import Prepared
from blitzd.proto.blitzd.engine import v1 as pb

if TYPE_CHECKING:
    from blitzd.engine.replica import Replica

STOP_S = 5.0
"""For the step that is running when a model is unloaded."""

T = TypeVar("T")


async def open_beside(
    prepared: Prepared,
    message: pb.LoadModelRequest,
    options: ReplicaOptions,
    publish: Callable[[pb.StepReport], None],
    crashed: Callable[[BaseException], None],
) -> "Replica":
    """`publish` and `crashed` are called in the event loop. When this is cancelled, what comes of
    it is closed."""
    loop = asyncio.get_running_loop()

    def open_it() -> "Replica":
        from blitzd.engine.replica import open_replica

        return open_replica(
            prepared,
            message.blocks_total,
            options,
            publish=lambda report: _tell(loop, publish, report),
            crashed=lambda error: _tell(loop, crashed, error),
            arriving=message.live,
        )

    opening = loop.run_in_executor(None, open_it)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(discard)
        raise


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[T], None], value: T) -> None:
    """From the step loop's thread. Once the event loop has ended nobody listens any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, value)


def discard(opening: "asyncio.Future[Replica]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close(STOP_S)
