"""One client connection: aiohttp's protocol, with deadlines and our error bodies."""

import asyncio
import logging
import socket
from typing import Any

from aiohttp import web

from blitzd.http.errors import ApiError, as_api_error
from blitzd.http.limits import Limits

log = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    __slots__ = ("_send_s",)

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, limits: Limits) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.idle_s,
            access_log=None,  # type: ignore[arg-type]  # aiohttp tests it for None itself
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
            # Compressed bodies are refused: their size is not known before it is too late.
            auto_decompress=False,
        )
        self._send_s = limits.send_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Ends what no deadline of ours sees: an answer handed to the kernel whole, for
            # a client that never takes it.
            milliseconds = int(self._send_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    async def finish_response(
        self,
        request: web.BaseRequest,
        resp: web.StreamResponse,
        start_time: float | None,
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before any middleware ran
            resp = as_api_error(resp).response()
        try:
            async with asyncio.timeout(self._send_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            log.warning("%s took nothing for %g s", request.remote, self._send_s)
            if self.transport is not None:
                self.transport.abort()
            return resp, True

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What no handler saw: bytes that are not HTTP, or a client that left."""
        if isinstance(exc, ConnectionError) or request.writer.output_size > 0:
            raise ConnectionError("the connection is of no more use") from exc
        if status < 500:
            failure = ApiError(status, f"not HTTP: {message or exc}", code="invalid_http")
        elif isinstance(exc, UnicodeEncodeError):
            # aiohttp refuses an Expect header by echoing it, before any handler runs.
            message = "Expect is no UTF-8; accepted: 100-continue"
            failure = ApiError(417, message, code="expectation_failed", param="Expect")
        else:
            failure = as_api_error(RuntimeError("a request ended outside its handler"))
            log.error("outside any handler", exc_info=exc)
        response = failure.response()
        response.headers["Server"] = "blitzd"
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A client's broken body was answered with a 400; it is not news for the operator."""
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            log.debug(*args, **kw)
        else:
            super().log_exception(*args, **kw)
