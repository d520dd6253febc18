"""A peer's arena, mapped read-only, and exact copies out of it.

The bytes of a dead peer stay readable, but they are no longer anyone's promise: the
connection that brought the descriptor is looked at between chunks and after the last, and
a copy whose peer is gone raises `PeerLost`.
"""

import asyncio
import contextlib
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np

from blitzd.fabric.copying import CHUNK_BYTES, LANES, ChunkedCopy, threads
from blitzd.fabric.errors import (
    FabricError,
    IdentityMismatch,
    PeerLost,
    SegmentError,
    TransferTimeout,
)
from blitzd.fabric.identity import Identity
from blitzd.fabric.segments import (
    Bytes,
    Segment,
    as_bytes,
    checked,
    pairs,
    refuse_overlap,
    total,
)


class MappedPeer:
    """Made by `connect`. Thread-safe for `alive`; the rest belongs to one event loop."""

    def __init__(self, connection: socket.socket, mapping: mmap.mmap, identity: Identity) -> None:
        self.identity = identity
        self.size = len(mapping)
        self.bytes: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        """The peer's arena as uint8[size], read-only."""
        self._connection = connection
        self._closed = False

    @classmethod
    async def connect(
        cls, path: str | os.PathLike[str], identity: str, deadline: float
    ) -> "MappedPeer":
        """Maps the arena that is served at `path`, if `identity` (`r0/3`) serves it.

        `deadline` is a time of `time.monotonic()`. Raises IdentityMismatch, PeerLost when
        nobody serves or the server dies, TransferTimeout.
        """
        expected = Identity.parse(identity)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                mapping = await _handshake(connection, os.fspath(path), expected)
        except TimeoutError:
            connection.close()
            raise TransferTimeout(f"{expected} at {path}: no answer by the deadline") from None
        except (OSError, ValueError) as error:
            connection.close()
            raise PeerLost(f"{expected} at {path}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return cls(connection, mapping, expected)

    @property
    def alive(self) -> bool:
        """False once the peer has ended or `close` was called."""
        if self._closed:
            return False
        try:
            return bool(self._connection.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def copy(
        self,
        source_segments: Sequence[Segment],
        target_buffer: object,
        target_segments: Sequence[Segment],
        deadline: float,
        on_bytes: Callable[[int], None] | None = None,
    ) -> int:
        """Copies the peer's segments onto the target's; returns the bytes moved.

        Runs on threads of the fabric, where `on_bytes` is told how many of the first bytes
        are there. When it raises, or is cancelled, nothing is written any more. Raises
        SegmentError before anything moved; PeerLost; TransferTimeout.
        """
        target = as_bytes(target_buffer, writable=True, name="target_buffer")
        sources = checked(source_segments, self.size, "source_segments")
        targets = checked(target_segments, len(target), "target_segments")
        refuse_overlap(targets, "target_segments")
        moved = total(sources)
        if moved != total(targets):
            raise SegmentError(
                f"source_segments have {moved} bytes, target_segments {total(targets)}"
            )
        error = await self._run(
            ChunkedCopy(
                self.bytes,
                target,
                pairs(sources, targets, CHUNK_BYTES),
                lambda: self._trouble(deadline),
                on_bytes,
            ),
            lanes=LANES if moved > CHUNK_BYTES else 1,
        )
        error = error or self._trouble(deadline)
        if error is None:
            return moved
        try:
            raise error
        finally:
            # Its traceback holds this frame, which would hold it, and both buffers, until
            # the next cycle collection.
            del error

    async def _run(self, copy: ChunkedCopy, lanes: int) -> FabricError | None:
        """Returns when no thread touches the target any more, also when cancelled."""
        loop = asyncio.get_running_loop()
        works = [loop.run_in_executor(threads(), copy.run) for _ in range(lanes)]
        try:
            await asyncio.wait(works)
        except asyncio.CancelledError:
            copy.stop()
            while not all(work.done() for work in works):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(works)
            raise
        for work in works:
            work.result()
        return copy.error

    def _trouble(self, deadline: float) -> FabricError | None:
        if not self.alive:
            return PeerLost(f"{self.identity} ended while its arena was being copied")
        if time.monotonic() >= deadline:
            return TransferTimeout(f"copy from {self.identity}: not done by the deadline")
        return None

    def fileno(self) -> int:
        """Readable once the peer has ended."""
        return self._connection.fileno()

    def close(self) -> None:
        """Hangs up. The mapping goes with its last view. Idempotent."""
        self._closed = True
        self._connection.close()


async def _handshake(connection: socket.socket, path: str, expected: Identity) -> mmap.mmap:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, path)
    await loop.sock_sendall(connection, f"arena {expected}\n".encode())
    await _readable(connection)
    reply, descriptors, _, _ = socket.recv_fds(connection, 128, 1)
    try:
        word, _, rest = reply.decode("ascii", "replace").rstrip("\n").partition(" ")
        if word == "no":
            raise IdentityMismatch(f"{path}: expected {expected}, found {rest}")
        if word != "ok" or not descriptors:
            raise ConnectionError(f"no descriptor came, only {reply!r}")
        return mmap.mmap(descriptors[0], int(rest), mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())


class MappedPeers:
    """The mappings of a process, one a replica. A newer epoch retires the older, and a death is
    noticed by itself: gigabytes of a dead peer must not wait for its next life."""

    def __init__(self) -> None:
        self._peers: dict[str, MappedPeer] = {}
        self._newest: dict[str, int] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    @property
    def identities(self) -> list[Identity]:
        """Of the peers that are mapped."""
        return [peer.identity for peer in self._peers.values()]

    async def get(self, path: str | os.PathLike[str], identity: str, deadline: float) -> MappedPeer:
        """The mapping of `identity`, made now if it is not there. Raises as `connect` does,
        and IdentityMismatch when a newer epoch of the replica has been seen."""
        wanted = Identity.parse(identity)
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._lock(wanted.replica).acquire()
        except TimeoutError:
            raise TransferTimeout(f"{wanted}: another connect took all the time") from None
        try:
            return await self._get(path, wanted, deadline)
        finally:
            self._lock(wanted.replica).release()

    def _lock(self, replica: str) -> asyncio.Lock:
        return self._connecting.setdefault(replica, asyncio.Lock())

    async def _get(
        self, path: str | os.PathLike[str], wanted: Identity, deadline: float
    ) -> MappedPeer:
        newest = self._newest.get(wanted.replica, wanted.epoch)
        if newest > wanted.epoch:
            raise IdentityMismatch(f"{wanted} was retired by epoch {newest}")
        known = self._peers.get(wanted.replica)
        if known is not None:
            if known.identity == wanted and known.alive:
                return known
            self._drop(known)
        peer = await MappedPeer.connect(path, str(wanted), deadline)
        self._peers[wanted.replica] = peer
        self._newest[wanted.replica] = wanted.epoch
        asyncio.get_running_loop().add_reader(peer.fileno(), self._heard, peer)
        return peer

    def _heard(self, peer: MappedPeer) -> None:
        # It never speaks: this is its end.
        if not peer.alive:
            self._drop(peer)

    def _drop(self, peer: MappedPeer) -> None:
        if self._peers.get(peer.identity.replica) is peer:
            del self._peers[peer.identity.replica]
            asyncio.get_running_loop().remove_reader(peer.fileno())
            peer.close()

    def close(self) -> None:
        """Hangs up on everyone."""
        for peer in list(self._peers.values()):
            self._drop(peer)
