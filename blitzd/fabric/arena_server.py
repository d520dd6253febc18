"""Hands an arena's descriptor to peers on this node.

Handshake, one line each way, at most 128 bytes: the peer says whom it expects
(`arena r0/3`), the server answers `ok SIZE` with the descriptor attached (SCM_RIGHTS), or
`no r0/4`, its true name, and hangs up. The connection then stays open and silent: its end
is how each side learns of the other's death.
"""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

from blitzd.fabric.arena import SharedArena
from blitzd.fabric.identity import Identity

LINE_BYTES = 128
HANDSHAKE_S = 2.0
CONNECTIONS = 256
"""More than any node has workers; a peer beyond it is hung up on."""
PATH_BYTES = 107
"""What `sockaddr_un` holds."""


class ArenaServer:
    """Serves `arena` on the unix socket `path` under the name `identity` (`r0/3`)."""

    def __init__(self, path: str | os.PathLike[str], arena: SharedArena, identity: str) -> None:
        self.path = Path(path)
        if len(os.fsencode(self.path)) > PATH_BYTES:
            raise ValueError(
                f"path: {self.path} has {len(os.fsencode(self.path))} bytes; "
                f"accepted: at most {PATH_BYTES}, the limit of a unix socket"
            )
        self.identity = Identity.parse(identity)
        self._arena = arena
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._peers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens. A socket file that a dead worker left at `path` is replaced."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setblocking(False)
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
        self._socket = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        """Hangs up on every peer and removes the socket file. Idempotent."""
        if self._socket is None or self._accepting is None:
            return
        tasks = [self._accepting, *self._peers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()
        self._socket = None
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                # Out of descriptors: the queue of the listener is the bound.
                await asyncio.sleep(0.1)
                continue
            if len(self._peers) >= CONNECTIONS:
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._peers.add(task)
            task.add_done_callback(self._peers.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            connection.setblocking(False)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(HANDSHAKE_S):
                    line = await read_line(connection)
                if line != f"arena {self.identity}":
                    connection.send(f"no {self.identity}\n".encode())
                    return
                reply = f"ok {self._arena.size}\n".encode()
                socket.send_fds(connection, [reply], [self._arena.fd])
                # The peer never speaks again: this returns when it is gone.
                await loop.sock_recv(connection, 1)


async def read_line(connection: socket.socket) -> str:
    """The next line, without its end. Raises ConnectionError when there is none."""
    loop = asyncio.get_running_loop()
    received = b""
    while not received.endswith(b"\n"):
        if len(received) >= LINE_BYTES:
            raise ConnectionError(f"a line longer than {LINE_BYTES} bytes")
        piece = await loop.sock_recv(connection, 1)
        if not piece:
            raise ConnectionError("the peer hung up before the end of its line")
        received += piece
    return received[:-1].decode("ascii", "replace")
