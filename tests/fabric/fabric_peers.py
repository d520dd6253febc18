"""Real peer processes for the fabric's tests, commanded over a pipe. They are forked from
the test, which has UCX loaded but never started, so that a new one is there in no time."""

import asyncio
import ctypes
import itertools
import multiprocessing
import os
import select
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import xxhash

from blitzd.fabric import CHUNK_BYTES, ArenaServer, MappedPeers, SharedArena, UcxFabric
from blitzd.fabric.ucx_env import binding

binding()
_context = multiprocessing.get_context("fork")

Segments = list[tuple[int, int]]
REPLY_S = 20.0
PR_SET_PDEATHSIG = 1


def content(seed: int, size: int) -> np.ndarray:
    """`size` bytes that only `seed` makes."""
    words = np.random.Generator(np.random.SFC64(seed)).integers(
        0, 1 << 63, size=-(-size // 8), dtype=np.uint64
    )
    return words.view(np.uint8)[:size]


def digest(array: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(array))


def moved_digest(seed: int, size: int, segments: Segments) -> int:
    """What a receiver that lays the segments end to end must have."""
    whole = content(seed, size)
    return digest(np.concatenate([whole[o : o + n] for o, n in segments] or [whole[:0]]))


def move(source, target, size, cut, into, within=10.0, source_extra=None, target_extra=None):
    """Starts a hand-over as the engine does; its tag, and the tickets of both ends."""
    tag = UcxFabric.new_tag()
    addresses = source.call("address"), target.call("address")
    common = {"tag": tag, "size": size, "within": within}
    sending = source.post(
        "send", to=addresses[1], seed=tag, segments=cut, **common, **(source_extra or {})
    )
    receiving = target.post(
        "receive", source=addresses[0], segments=into, **common, **(target_extra or {})
    )
    return tag, sending, receiving


class PeerProcess:
    """A peer, seen from the test."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_main, args=(theirs, identity), daemon=True)
        self._process.start()
        theirs.close()
        self._ids = itertools.count()
        self._replies: dict[int, Any] = {}
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def post(self, op: str, **arguments: Any) -> int:
        ticket = next(self._ids)
        self._pipe.send((ticket, op, arguments))
        return ticket

    def reply(self, ticket: int, within: float = REPLY_S) -> Any:
        """Raises TimeoutError, or EOFError when the process is gone."""
        deadline = time.monotonic() + within
        while ticket not in self._replies:
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{self.identity}: no reply within {within} s")
            arrived, reply = self._pipe.recv()
            self._replies[arrived] = reply
        return self._replies.pop(ticket)

    def replied(self, ticket: int) -> bool:
        while self._pipe.poll():
            arrived, reply = self._pipe.recv()
            self._replies[arrived] = reply
        return ticket in self._replies

    def call(self, op: str, **arguments: Any) -> Any:
        return self.reply(self.post(op, **arguments))

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stopped(self) -> float:
        """Waits until it has stopped itself; the time when that was seen."""
        deadline = time.monotonic() + REPLY_S
        while time.monotonic() < deadline:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "T":
                return time.monotonic()
            time.sleep(0.001)
        raise TimeoutError(f"{self.identity} did not stop")

    def gone(self) -> int:
        """Waits for its end; the exit code."""
        self._process.join(REPLY_S)
        code = self._process.exitcode
        assert code is not None, f"{self.identity} did not end"
        self._process.close()
        self._pipe.close()
        return code

    def end(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self.gone()


# In the peer.


def _main(pipe: Connection, identity: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    uvloop.run(_Servant(pipe, identity).serve())


class _Servant:
    def __init__(self, pipe: Connection, identity: str) -> None:
        self._pipe = pipe
        self._identity = identity
        self._fabric = UcxFabric(identity)
        self._maps = MappedPeers()
        self._arenas: list[Any] = []
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()

        def command() -> None:
            try:
                while self._pipe.poll():
                    ticket, op, arguments = self._pipe.recv()
                    task = loop.create_task(self._run(ticket, op, arguments))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            except EOFError:
                loop.remove_reader(self._pipe.fileno())
                self._ended.set()

        loop.add_reader(self._pipe.fileno(), command)
        await self._ended.wait()

    async def _run(self, ticket: int, op: str, arguments: dict[str, Any]) -> None:
        start = time.monotonic()
        try:
            result = await getattr(self, op)(**arguments)
        except (Exception, asyncio.CancelledError) as error:
            result = {
                "error": type(error).__name__,
                "text": str(error),
                "took": time.monotonic() - start,
                "at": time.monotonic(),
            }
        self._pipe.send((ticket, result))

    async def address(self) -> bytes:
        await self._fabric.start()
        return self._fabric.address

    async def send(
        self,
        to: bytes,
        tag: int,
        seed: int,
        size: int,
        segments: Segments,
        within: float = 10.0,
        chunk: int = CHUNK_BYTES,
        **acts: int,
    ) -> dict[str, Any]:
        watch = _acting(**acts)
        source = await asyncio.to_thread(content, seed, size)
        deadline = time.monotonic() + within
        moved = await self._fabric.send(
            to, tag, source, segments, deadline, watch, chunk_bytes=chunk
        )
        return {"moved": moved}

    async def receive(
        self,
        source: bytes,
        tag: int,
        size: int,
        segments: Segments,
        within: float = 10.0,
        chunk: int = CHUNK_BYTES,
        **acts: int,
    ) -> dict[str, Any]:
        target = await asyncio.to_thread(np.full, size, 0xEE, dtype=np.uint8)
        watch = _acting(**acts)
        moved = await self._fabric.receive(
            source, tag, target, segments, time.monotonic() + within, watch, chunk
        )
        at = time.monotonic()
        return {"moved": moved, "at": at, **await asyncio.to_thread(_seen, target, segments)}

    async def serve_arena(self, path: str, seed: int, size: int) -> None:
        arena = SharedArena(size)
        arena.bytes[:] = content(seed, size)
        server = ArenaServer(path, arena, self._identity)
        await server.start()
        self._arenas.append((arena, server))

    async def copy(
        self,
        path: str,
        identity: str,
        source: Segments,
        size: int,
        target: Segments,
        within: float = 10.0,
        die_at: int | None = None,
        kill_at: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        buffer = await asyncio.to_thread(np.full, size, 0xEE, dtype=np.uint8)
        deadline = time.monotonic() + within
        peer = await self._maps.get(path, identity, deadline)
        watch = _killer(die_at) if kill_at is None else _killer(kill_at[1], kill_at[0])
        moved = await peer.copy(source, buffer, target, deadline, watch)
        return {"moved": moved, **await asyncio.to_thread(_seen, buffer, target)}

    async def close(self) -> None:
        await self._fabric.close()
        await self._fabric.close()

    async def leave(self) -> None:
        self._ended.set()

    async def torch_view(self) -> float:
        import torch

        arena = SharedArena(4096, prefault=True)
        torch.frombuffer(arena.buffer, dtype=torch.float32)[3] = 1.5
        return float(arena.bytes[12:16].view(np.float32)[0])

    async def usage(self) -> dict[str, Any]:
        times = os.times()
        return {
            "fds": len(os.listdir("/proc/self/fd")),
            "rss": _resident(),
            "held": self._fabric.held_buffers,
            "cpu": times.user + times.system,
        }


def _seen(target: np.ndarray, segments: Segments) -> dict[str, Any]:
    """The bytes at the segments, and whether all others were left alone."""
    mask = np.zeros(len(target), dtype=bool)
    for offset, length in segments:
        mask[offset : offset + length] = True
    pieces = [target[o : o + n] for o, n in segments] or [target[:0]]
    return {
        "digest": digest(np.concatenate(pieces)),
        "others_untouched": bool((target[~mask] == 0xEE).all()),
    }


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def _acting(
    die_at: int | None = None,
    stop_at: int | None = None,
    cancel_at: int | None = None,
    raise_at: int | None = None,
) -> Any:
    """An `on_bytes` that does something at that many bytes."""
    return _killer(die_at) or _stopper(stop_at) or _canceller(cancel_at) or _raiser(raise_at)


def _killer(at: int | None, pid: int | None = None) -> Any:
    """Ends this process, or `pid`, by SIGKILL once `at` bytes are there."""
    if at is None:
        return None
    killed = False

    def watch(count: int) -> None:
        nonlocal killed
        if killed or count < at:
            return
        killed = True
        if pid is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            gone = os.pidfd_open(pid)
            os.kill(pid, signal.SIGKILL)
            select.select([gone], [], [], 5.0)
            os.close(gone)

    return watch


def _stopper(at: int | None) -> Any:
    """Stops this process, once, when `at` bytes are there."""
    if at is None:
        return None
    stopped = False

    def watch(count: int) -> None:
        nonlocal stopped
        if count >= at and not stopped:
            stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    return watch


def _raiser(at: int | None) -> Any:
    if at is None:
        return None

    def watch(count: int) -> None:
        if count >= at:
            raise ZeroDivisionError("the callback is broken")

    return watch


def _canceller(at: int | None) -> Any:
    """Cancels the calling task once `at` bytes are there, and slows what comes after."""
    if at is None:
        return None
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    cancel = task.cancel
    asked = False

    def watch(count: int) -> None:
        nonlocal asked
        if count < at:
            return
        if not asked:
            asked = True
            loop.call_soon_threadsafe(cancel)
        time.sleep(0.005)

    return watch
