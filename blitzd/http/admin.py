"""The operator's routes: the folded state, and the log as JSON lines."""

import asyncio
import sys
from contextlib import aclosing

import msgspec
from aiohttp import web

from blitzd.http.errors import ApiError, as_api_error, bad_request
from blitzd.http.limits import Limits
from blitzd.http.neutral import shown
from blitzd.http.stream import ReaderGone, Stream
from blitzd.node.face import NodeFace

DEFAULT_EVENTS = 1000
MAX_EVENTS = 100_000
_ACCEPTED = {
    "since": "an integer of at least 0",
    "limit": f"an integer from 1 to {MAX_EVENTS}",
    "follow": "true, false, 1 or 0",
}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class AdminRoutes:
    def __init__(self, node: NodeFace, limits: Limits) -> None:
        self._node = node
        self._limits = limits
        self._followers: set[asyncio.Timeout] = set()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/admin/state", self.state),
            web.get("/admin/events", self.events),
        ]

    async def end_followers(self, _: web.Application) -> None:
        """Shutdown: streams without an end of their own end now, and in good order."""
        now = asyncio.get_running_loop().time()
        for follower in self._followers:
            follower.reschedule(now)

    async def state(self, _: web.Request) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(self._node.state()), content_type="application/json"
        )

    async def events(self, request: web.Request) -> web.StreamResponse:
        """One record a line. With `follow` and no `limit` it goes on until the client leaves."""
        since, limit, follow = _query(request)
        stream = Stream(request, self._limits, "application/jsonl")
        until_shutdown = asyncio.timeout(None)
        try:
            async with until_shutdown:
                self._followers.add(until_shutdown)
                await self._send_events(stream, since, limit, follow)
        except ReaderGone:
            pass
        except Exception as failure:
            if not until_shutdown.expired():
                if not stream.opened:
                    raise
                await stream.send_last(_line(as_api_error(failure).body()))
        finally:
            self._followers.discard(until_shutdown)
        return stream.response

    async def _send_events(self, stream: Stream, since: int, limit: int, follow: bool) -> None:
        await stream.send(b"")
        async with aclosing(self._node.events(since, limit, follow)) as records:
            async for record in records:
                await stream.send(_line(record))


def _line(body: object) -> bytes:
    return msgspec.json.encode(body) + b"\n"


def _query(request: web.Request) -> tuple[int, int, bool]:
    """since, limit, follow. Raises ApiError (400)."""
    for name in request.query:
        if name not in _ACCEPTED:
            raise bad_request(
                f"unknown parameter {shown(name)}; accepted: {', '.join(_ACCEPTED)}",
                param=name,
                code="unknown_parameter",
            )
    follow_text = request.query.get("follow", "false")
    if follow_text not in _FLAGS:
        raise _refused("follow", follow_text)
    follow = _FLAGS[follow_text]
    unlimited = sys.maxsize if follow else DEFAULT_EVENTS
    since = _integer(request, "since", 0, 0, sys.maxsize)
    return since, _integer(request, "limit", unlimited, 1, MAX_EVENTS), follow


def _integer(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and low <= int(text) <= high):
        raise _refused(name, text)
    return int(text)


def _refused(name: str, text: str) -> ApiError:
    return bad_request(f"{name} is {shown(text)}; accepted: {_ACCEPTED[name]}", param=name)
