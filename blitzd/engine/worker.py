"""The worker process: one replica, one gRPC server on a unix socket, and over TCP for other
nodes if there are any.

It leads its own session and outlives the daemon that started it, for a while: with no daemon
watching or asking for its health for `orphan_timeout_s` it ends by itself.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpclib.events
import structlog
import uvloop
from grpclib.server import Server
from structlog.typing import EventDict

from blitzd.engine.calls import guard
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.service import EngineService
from blitzd.engine.standby import Standby
from blitzd.fabric import PLAIN, Identity, Tls, endpoint_of

log = structlog.get_logger()

END_S = 2.0
"""For calls that are being answered when the worker is told to end."""

SILENT_S = 5
"""Without an answer of its kernel, a caller on another node is gone."""

SOCKET_BYTES = 107


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    identity: Identity
    socket: Path
    orphan_timeout_s: float = 20.0
    host: str = ""
    """Of this node, to listen on for other nodes, on any free port; empty: not at all."""
    tls: Tls = PLAIN
    """Between nodes."""
    network_device: str = ""
    """That this worker's bytes to other nodes pass, as UCX names it (eth1, mlx5_0:1); empty: any
    of the machine."""
    verify_kv: bool = False
    """Compare checksums of imported KV with the source's."""
    replica: ReplicaOptions = field(default_factory=ReplicaOptions)
    model: Path | None = None
    """The prepared directory that it will probably be told to load: kept mapped and warm."""

    def __post_init__(self) -> None:
        longest = len(os.fsencode(self.kv_socket))
        if longest > SOCKET_BYTES:
            raise ValueError(
                f"socket: {self.kv_socket} beside it has {longest} bytes; accepted: at most "
                f"{SOCKET_BYTES}, the limit of a unix socket"
            )

    @property
    def kv_socket(self) -> Path:
        """Where peers on this node get the KV arena: beside the gRPC socket."""
        return self.socket.with_suffix(".kv.sock")


def run(options: WorkerOptions) -> int:
    """Serves until it is told to end (0) or cannot go on (1)."""
    if os.getsid(0) != os.getpid():
        with contextlib.suppress(PermissionError):  # a group leader started by a shell
            os.setsid()
    _log_to_stderr(options.identity)
    if options.network_device:
        # The loopback leads to the other workers of this node, whichever device is theirs.
        os.environ["UCX_NET_DEVICES"] = f"{options.network_device},lo"
    return uvloop.run(serve(options))


def _log_to_stderr(identity: Identity) -> None:
    """One JSON object a line. Tracebacks come without the values of variables: those are
    people's prompts."""

    def add_worker(logger: Any, method: str, event: EventDict) -> EventDict:
        event["worker"] = str(identity)
        return event

    structlog.configure(
        processors=[
            add_worker,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _get_ready(options: WorkerOptions, standby: Standby) -> None:
    began = time.monotonic()
    import blitzd.engine.replica  # noqa: F401

    log.info("engine imported", ms=round((time.monotonic() - began) * 1e3))
    if options.model is not None and options.replica.weights == "map":
        standby.warm(options.model, options.replica)


async def serve(options: WorkerOptions) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0)
    service = EngineService(
        options.identity,
        options.kv_socket,
        options.replica,
        crashed=lambda error: end(1),
        verify_kv=options.verify_kv,
        tls=options.tls,
    )
    servers = []
    if options.host:
        afar = _listen_afar(options.host)
        service.endpoint = endpoint_of(options.host, afar.getsockname()[1])
        servers.append(await _start(service, afar, options.tls))
    # Last, since who finds it asks where others find us.
    servers.append(await _start(service, _listen(options.socket), PLAIN))
    log.info(
        "worker serves", socket=str(options.socket), endpoint=service.endpoint, pid=os.getpid()
    )
    # Two seconds of reading torch from disk pass while the daemon finds out that we are here.
    ready = (options, service.standby)
    threading.Thread(target=_get_ready, args=ready, name="get-ready", daemon=True).start()
    if options.host or options.network_device:
        fabric = asyncio.create_task(service.start_fabric())
        ended.add_done_callback(lambda _: fabric.cancel())
    orphaned = asyncio.create_task(_wait_orphaned(service, options.orphan_timeout_s))
    orphaned.add_done_callback(lambda task: None if task.cancelled() else end(0))
    try:
        return await ended
    finally:
        orphaned.cancel()
        for server in servers:
            server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                for server in servers:
                    await server.wait_closed()
        await service.close()
        options.socket.unlink(missing_ok=True)
        log.info("worker ends")


async def _start(service: EngineService, listener: socket.socket, tls: Tls) -> Server:
    server = Server([service])
    grpclib.events.listen(server, grpclib.events.RecvRequest, guard)
    await server.start(sock=listener, ssl=tls.server)
    return server


def _listen_afar(host: str) -> socket.socket:
    """Raises OSError when `host` is not ours. A caller that vanishes without a word is found
    out, so that a worker whose controller is cut off knows itself orphaned."""
    [(family, _, _, _, address), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
        listener.bind(address)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen(path: Path) -> socket.socket:
    """A listening socket that appears at `path` only once it accepts connections, in place
    of one that a dead worker left."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    hidden = path.with_name(f".{path.name}")
    try:
        hidden.unlink(missing_ok=True)
        listener.bind(str(hidden))
        hidden.chmod(0o600)
        listener.listen(64)
        hidden.rename(path)
    except BaseException:
        listener.close()
        raise
    return listener


async def _wait_orphaned(service: EngineService, timeout_s: float) -> None:
    while True:
        silent = 0.0 if service.attended else time.monotonic() - service.last_heard
        if silent >= timeout_s:
            log.warning("no daemon has been heard of; ending", silent_s=round(silent, 1))
            return
        await asyncio.sleep(min(1.0, timeout_s - silent))
