"""The thread that drives UCX, and the table of peers that it keeps."""

import logging
import os
import secrets
import select
import threading
import time
from collections import deque

from blitzd.fabric.errors import FabricError, IdentityMismatch, PeerLost
from blitzd.fabric.identity import Identity
from blitzd.fabric.ucx_peer import STALL_S, EarlyWords, UcxPeer
from blitzd.fabric.ucx_transfer import Job
from blitzd.fabric.ucx_wire import TAG_BITS, Address
from blitzd.fabric.ucx_worker import UcxWorker

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
        self._fabric_id = secrets.randbits(TAG_BITS)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._commands: deque[tuple[Address, int, Job | None, bool]] = deque()
        """(peer, tag, job, whether it receives); no job: give the transfer up."""
        self._ended = False
        self._stopping = False
        self._peers: dict[int, UcxPeer] = {}
        self._newest: dict[str, Address] = {}
        self._early = EarlyWords()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.address = b""
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
            worker = UcxWorker()
            self.address = Address(self._identity, self._fabric_id, worker.address).encode()
        except BaseException as error:
            self._failure = error
            self._started.set()
            return
        reason = "the fabric was closed"
        try:
            self._started.set()
            self._loop(worker)
        except Exception as error:
            log.exception("the fabric of %s broke", self._identity)
            reason = f"the fabric broke: {error!r}"
        self._end(worker, reason)

    def _loop(self, worker: UcxWorker) -> None:
        with select.epoll() as epoll:
            epoll.register(self._bell, select.EPOLLIN)
            epoll.register(worker.fd, select.EPOLLIN)
            next_tick = 0.0
            while not self._stopping:
                before = worker.now
                worker.now = now = time.monotonic()
                if now - before > STALL_S / 2:
                    self._excuse(now)
                moved = self._turn(worker)
                busy = worker.retired or any(peer.busy for peer in self._peers.values())
                if busy and now >= next_tick:
                    self._tick(worker)
                    next_tick = now + TICK_S
                if moved or not worker.arm():
                    continue
                wait = max(0.0, next_tick - now) if busy else IDLE_S
                for fd, _ in epoll.poll(wait):
                    if fd == self._bell:
                        os.eventfd_read(self._bell)

    def _turn(self, worker: UcxWorker) -> bool:
        moved = worker.progress()
        while self._commands:
            self._obey(worker, *self._commands.popleft())
            moved = True
        for message in worker.heard():
            moved = True
            peer = self._peers.get(message.sender)
            if peer is not None:
                peer.hear(message)
            else:
                self._early.hear(message)
        for peer in list(self._peers.values()):
            try:
                moved |= peer.sweep()
            except (worker.error, PeerLost) as error:
                self._lose(peer, error)
                moved = True
        return moved

    def _excuse(self, now: float) -> None:
        for peer in self._peers.values():
            peer.excuse(now)

    def _tick(self, worker: UcxWorker) -> None:
        worker.progress_all()
        for peer in list(self._peers.values()):
            try:
                peer.tick(worker.now)
            except (worker.error, PeerLost) as error:
                self._lose(peer, error)

    def _obey(
        self, worker: UcxWorker, address: Address, tag: int, job: Job | None, receives: bool
    ) -> None:
        if job is None:
            known = self._peers.get(address.fabric_id)
            if known is not None:
                known.give_up(tag, FabricError("the caller gave the transfer up"))
            return
        try:
            peer = self._peer(worker, address)
            if receives:
                peer.start_receiving(job)
            else:
                peer.start_sending(job)
        except FabricError as error:
            # Without its traceback: that holds objects of UCX, and they are to be released
            # on this thread.
            error.__cause__ = None
            job.finish(error.with_traceback(None))

    def _peer(self, worker: UcxWorker, address: Address) -> UcxPeer:
        """The line to `address`, made now if need be. A newer life retires the older."""
        newest = self._newest.get(address.identity.replica)
        if newest is not None and newest.fabric_id != address.fabric_id:
            if newest.identity.epoch > address.identity.epoch:
                raise IdentityMismatch(f"{address.identity} was retired by {newest.identity}")
            retired = self._peers.get(newest.fabric_id)
            if retired is not None:
                self._lose(retired, f"retired by {address.identity}")
        self._newest[address.identity.replica] = address
        peer = self._peers.get(address.fabric_id)
        if peer is None:
            peer = UcxPeer(worker, address, self._fabric_id, self._early)
            self._peers[address.fabric_id] = peer
        return peer

    def _lose(self, peer: UcxPeer, reason: object) -> None:
        del self._peers[peer.address.fabric_id]
        peer.lost(reason)

    def _end(self, worker: UcxWorker, reason: str) -> None:
        with self._lock:
            self._ended = True
            abandoned = [job for _, _, job, _ in self._commands if job is not None]
            self._commands.clear()
        for peer in list(self._peers.values()):
            self._lose(peer, reason)
        for job in abandoned:
            job.finish(PeerLost(reason))
        worker.progress_all()
        os.close(self._bell)
