"""The thread that drives UCX: it sleeps armed, and wakes for UCX, callers and the clock."""

import logging
import os
import select
import threading
import time
from collections import deque

from blitzd.fabric.errors import FabricError
from blitzd.fabric.identity import Identity
from blitzd.fabric.ucx_lines import UcxLines
from blitzd.fabric.ucx_peer import STALL_S
from blitzd.fabric.ucx_transfer import Job
from blitzd.fabric.ucx_wire import Address

TICK_S = 0.05
"""While something is open: how late a deadline, a beat or the watchdog may come."""
IDLE_S = 5.0
"""With nothing open, UCX is let look after its connections so often."""
STOP_S = 5.0
START_S = 30.0
"""Loading the library from a cold disk is the slow part."""

log = logging.getLogger(__name__)


class UcxThread:
    """Runs from construction to `stop`. Its public methods may be called from any thread."""

    def __init__(self, identity: Identity) -> None:
        """Raises what the start of UCX raises."""
        self._identity = identity
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._commands: deque[tuple[Address, int, Job | None, bool]] = deque()
        """(peer, tag, job, whether it receives); no job: give the transfer up."""
        self._ended = False
        self._stopping = False
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.address = b""
        self.held = 0
        """Buffers of ended transfers that UCX has yet to let go of."""
        self.peers: tuple[str, ...] = ()
        """Identities that an endpoint leads to."""
        self._thread = threading.Thread(target=self._run, name="ucx", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise FabricError(f"UCX did not start within {START_S} s")
        if self._failure is not None:
            raise self._failure

    def send(self, peer: Address, job: Job) -> None:
        """Begins to send; the end comes through `job.finish`."""
        self._submit(peer, job.tag, job, False)

    def receive(self, peer: Address, job: Job) -> None:
        """Begins to receive; the end comes through `job.finish`."""
        self._submit(peer, job.tag, job, True)

    def give_up(self, peer: Address, tag: int) -> None:
        """Ends a transfer early; a no-op when it has ended."""
        self._submit(peer, tag, None, False)

    def stop(self) -> None:
        """Ends every transfer, then the thread. Idempotent."""
        self._stopping = True
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._bell, 1)
        self._thread.join(STOP_S)

    def _submit(self, peer: Address, tag: int, job: Job | None, receives: bool) -> None:
        with self._lock:
            if not self._ended:
                self._commands.append((peer, tag, job, receives))
                os.eventfd_write(self._bell, 1)
                return
        if job is not None:
            job.finish(FabricError(f"the fabric of {self._identity} has ended"))

    # Everything below runs on the thread.

    def _run(self) -> None:
        try:
            lines = UcxLines(self._identity)
            self.address = lines.own.encode()
        except BaseException as error:
            self._failure = error
            self._started.set()
            return
        self._started.set()
        reason = "the fabric was closed"
        try:
            self._loop(lines)
        except Exception as error:
            log.exception("the fabric of %s broke", self._identity)
            reason = f"the fabric broke: {error!r}"
        with self._lock:
            self._ended = True
            os.close(self._bell)
        self._obey(lines)
        lines.end(reason)

    def _loop(self, lines: UcxLines) -> None:
        worker = lines.worker
        with select.epoll() as epoll:
            epoll.register(self._bell, select.EPOLLIN)
            epoll.register(worker.fd, select.EPOLLIN)
            next_tick = 0.0
            while not self._stopping:
                before, worker.now = worker.now, time.monotonic()
                if worker.now - before > STALL_S / 2:
                    lines.excuse()
                moved = self._obey(lines)
                moved |= lines.turn()
                busy = lines.busy
                self.held, self.peers = worker.retired, lines.names
                if worker.now >= next_tick:
                    lines.tick()
                    next_tick = worker.now + (TICK_S if busy else IDLE_S)
                elif busy:
                    next_tick = min(next_tick, worker.now + TICK_S)
                if moved or not worker.arm():
                    continue
                for fd, _ in epoll.poll(max(0.0, next_tick - worker.now)):
                    if fd == self._bell:
                        os.eventfd_read(self._bell)

    def _obey(self, lines: UcxLines) -> bool:
        """Carries out what was asked for; True when there was something."""
        count = len(self._commands)
        for _ in range(count):
            peer, tag, job, receives = self._commands.popleft()
            if job is None:
                lines.give_up(peer, tag)
            elif receives:
                lines.receive(peer, job)
            else:
                lines.send(peer, job)
        return count > 0
