"""A streamed answer that a slow or absent reader cannot make us hold."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from blitzd.http.limits import Limits

log = logging.getLogger(__name__)


class ReaderGone(ConnectionError):
    """The client left or took nothing for `Limits.send_s`; its connection is closed."""


class Stream:
    """A response written piece by piece, each with a deadline.

    At most the transport's high-water mark (64 KiB) and one piece wait in memory: `send`
    returns only when the transport has gone below its low-water mark.
    """

    def __init__(self, request: web.Request, limits: Limits, content_type: str) -> None:
        self._request = request
        self._send_s = limits.send_s
        self._silent_s = limits.keepalive_s
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": content_type,
                "Cache-Control": "no-cache",
                # nginx collects an answer before it passes it on, unless told not to.
                "X-Accel-Buffering": "no",
            }
        )

    @property
    def opened(self) -> bool:
        """The status line is decided: errors can only be sent in-band."""
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Raises ReaderGone."""
        self._sent_at = self._clock()
        try:
            async with asyncio.timeout(self._send_s):
                if not self.opened:
                    await self.response.prepare(self._request)
                await self.response.write(data)
                await self._request.writer.drain()
        except TimeoutError:
            log.warning("%s took nothing for %g s", self._request.remote, self._send_s)
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ReaderGone from None
        except ConnectionError as failure:
            raise ReaderGone from failure

    @contextlib.asynccontextmanager
    async def kept_alive(self, comment: bytes) -> AsyncIterator[None]:
        """Once it is open, `comment` fills every `Limits.keepalive_s` of silence."""
        task = asyncio.create_task(self._fill_silence(comment))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _fill_silence(self, comment: bytes) -> None:
        with contextlib.suppress(ReaderGone):  # whoever sends next hears of it too
            while True:
                left_s = self._sent_at + self._silent_s - self._clock()
                if left_s > 0 or not self.opened:
                    await asyncio.sleep(left_s if left_s > 0 else self._silent_s)
                else:
                    await self.send(comment)

    async def send_last(self, data: bytes) -> None:
        """Like `send`, for the news of a failure: if the client is gone, so be it."""
        with contextlib.suppress(ReaderGone):
            await self.send(data)
