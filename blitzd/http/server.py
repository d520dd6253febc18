"""The two applications, and the sockets they are served on."""

import asyncio
import re
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

from blitzd.http.admin import AdminRoutes
from blitzd.http.admin_guard import refuse_strangers
from blitzd.http.admin_verbs import AdminVerbs
from blitzd.http.connection import Connection
from blitzd.http.errors import as_api_error, bad_request
from blitzd.http.limits import DEFAULT_LIMITS, Limits
from blitzd.http.metrics import Metrics
from blitzd.http.openai import OpenAIRoutes
from blitzd.http.probes import Probes
from blitzd.http.tasks import TaskOwner
from blitzd.node.face import NodeFace

PUBLIC_PORT = 11236
ADMIN_PORT = 11237

_REQUEST_ID = web.RequestKey("request_id", str)
_VALID_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def public_app(node: NodeFace, limits: Limits = DEFAULT_LIMITS) -> web.Application:
    """The OpenAI API, the probes and `/metrics`."""
    owner = TaskOwner()
    app = _app(owner, limits)
    for group in (OpenAIRoutes(node, owner, limits), Probes(node), Metrics(node)):
        app.add_routes(group.routes())
    return app


def admin_app(
    node: NodeFace, limits: Limits = DEFAULT_LIMITS, host: str = "127.0.0.1"
) -> web.Application:
    """The operator's API. It has no authentication: serve it where only operators are.
    `host` is the name that it is reached by, beside addresses and localhost."""
    app = _app(TaskOwner(), limits)
    app.middlewares.append(refuse_strangers(host))
    admin = AdminRoutes(node, limits)
    app.add_routes([*admin.routes(), *AdminVerbs(node, limits).routes()])
    app.on_shutdown.append(admin.end_followers)
    return app


def _app(owner: TaskOwner, limits: Limits) -> web.Application:
    async def close(_: web.Application) -> None:
        await owner.close(limits.release_s)

    async def headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "blitzd"
        response.headers["X-Request-Id"] = request.get(_REQUEST_ID) or _new_request_id()

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        owner.adopt(task)  # shutdown waits for handlers to clean up after their cancellation
        try:
            request[_REQUEST_ID] = _request_id(request)
            return await handler(request)
        except Exception as failure:
            if isinstance(failure, ConnectionError) and _is_gone(request):
                raise  # there is nobody to answer
            return as_api_error(failure).response()

    app = web.Application(middlewares=[answered], client_max_size=limits.body_bytes)
    app.on_response_prepare.append(headers)
    app.on_cleanup.append(close)
    return app


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _request_id(request: web.Request) -> str:
    """The client's X-Request-Id, or a new one. Raises ApiError (400)."""
    given = request.headers.get("X-Request-Id")
    if given is None:
        return _new_request_id()
    if not _VALID_REQUEST_ID.fullmatch(given):
        raise bad_request(
            "X-Request-Id is not usable; accepted: 1 to 128 printable ASCII characters "
            "without spaces",
            param="X-Request-Id",
        )
    return given


def _new_request_id() -> str:
    return f"req_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class Serving:
    """Where a node is being served: the ports in use, also when 0 was asked for."""

    host: str
    port: int
    admin_port: int


@asynccontextmanager
async def serve(
    node: NodeFace,
    *,
    host: str = "0.0.0.0",
    port: int = PUBLIC_PORT,
    admin_host: str = "127.0.0.1",
    admin_port: int = ADMIN_PORT,
    admin_socket: Path | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> AsyncIterator[Serving]:
    """Serves `node` for as long as the block runs. Needs asyncio.

    Leaving it closes the listening sockets, lets requests end for `limits.shutdown_s` and
    cuts off the rest; drain the node first to lose none. Raises OSError, naming the
    address, when one cannot be bound.
    """
    async with AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        admin = await stack.enter_async_context(
            _running(admin_app(node, limits, admin_host), limits)
        )
        public = await stack.enter_async_context(_running(public_app(node, limits), limits))
        servers = [
            await loop.create_server(lambda: Connection(public, loop, limits), host, port),
            await loop.create_server(
                lambda: Connection(admin, loop, limits), admin_host, admin_port
            ),
        ]
        for server in servers:
            stack.callback(server.close)
        if admin_socket is not None:
            sock = stack.enter_context(_unix_socket(admin_socket))
            server = await loop.create_unix_server(
                lambda: Connection(admin, loop, limits), sock=sock
            )
            stack.callback(server.close)
        yield Serving(host, *(server.sockets[0].getsockname()[1] for server in servers))


@asynccontextmanager
async def _running(app: web.Application, limits: Limits) -> AsyncIterator[web.Server]:
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        # aiohttp waits this long for handlers, and once more after asking them to stop.
        shutdown_timeout=limits.shutdown_s / 2,
        access_log=None,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        yield runner.server
    finally:
        await runner.cleanup()


@contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """A bound socket at `path` for the owner and the group. One that a dead process left
    is replaced; one that answers, or a file of another kind, is an OSError."""
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError(f"cannot listen on {path}: it is not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(f"cannot listen on {path}: another process does")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        try:
            path.chmod(0o660)  # nobody can connect before listen()
            yield sock
        finally:
            path.unlink(missing_ok=True)
