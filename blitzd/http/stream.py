"""A streamed answer that a slow or absent reader cannot make us hold."""

import asyncio
import contextlib
import logging

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

    async def send_last(self, data: bytes) -> None:
        """Like `send`, for the news of a failure: if the client is gone, so be it."""
        with contextlib.suppress(ReaderGone):
            await self.send(data)
