"""The lines to all peers. Made, used and released on the fabric's thread."""

import logging
import secrets
from collections.abc import Callable

from blitzd.fabric.errors import FabricError, IdentityMismatch, PeerLost
from blitzd.fabric.identity import Identity
from blitzd.fabric.ucx_peer import EarlyWords, UcxPeer
from blitzd.fabric.ucx_transfer import Job
from blitzd.fabric.ucx_wire import TAG_BITS, Address, Control, Kind
from blitzd.fabric.ucx_worker import UcxWorker

log = logging.getLogger(__name__)

LINES = 1024
"""Peers beyond it are not connected back to; our own transfers always are."""


class UcxLines:
    """Starts UCX; raises what that raises."""

    def __init__(self, identity: Identity) -> None:
        self.worker = UcxWorker()
        self.own = Address(identity, secrets.randbits(TAG_BITS), self.worker.address)
        self.names: tuple[str, ...] = ()
        """Of those that an endpoint leads to."""
        self._peers: dict[int, UcxPeer] = {}
        self._newest: dict[str, Address] = {}
        """By replica: the life that was last asked for."""
        self._early = EarlyWords()

    @property
    def busy(self) -> bool:
        """Something is to be watched: a transfer, or memory that UCX has yet to let go of."""
        return self.worker.retired > 0 or any(peer.busy for peer in self._peers.values())

    def send(self, address: Address, job: Job) -> None:
        self._begin(address, job, UcxPeer.start_sending)

    def receive(self, address: Address, job: Job) -> None:
        self._begin(address, job, UcxPeer.start_receiving)

    def give_up(self, address: Address, tag: int) -> None:
        """Ends a transfer for its caller's sake; a no-op when it has ended."""
        peer = self._peers.get(address.fabric_id)
        if peer is not None:
            error = FabricError("the caller gave the transfer up")
            self._guard(peer, lambda: peer.give_up(tag, error))

    def turn(self) -> bool:
        """Moves what can move; True when something did."""
        moved = self.worker.progress()
        for message in self.worker.heard():
            self._hear(message)
            moved = True
        for peer in list(self._peers.values()):
            moved |= self._guard(peer, peer.sweep)
        return moved

    def tick(self) -> None:
        """Deadlines, pings and the watchdog."""
        self.worker.progress_all()
        for peer in list(self._peers.values()):
            self._guard(peer, peer.tick)

    def excuse(self) -> None:
        """This process itself stood still: the silence of its peers proves nothing."""
        for peer in self._peers.values():
            peer.excuse()

    def end(self, reason: str) -> None:
        """Ends every transfer, and tells the peers by closing."""
        for peer in list(self._peers.values()):
            try:
                self._lose(peer, reason)
            except self.worker.error:
                log.exception("closing the line to %s", peer.name)

    def _begin(self, address: Address, job: Job, start: Callable[[UcxPeer, Job], None]) -> None:
        try:
            self._retire_older(address)
            peer = self._connected(address)
            self._guard(peer, lambda: start(peer, job))
        except FabricError as error:
            # Without its traceback: that holds objects of UCX, and they are to be released
            # on this thread.
            error.__cause__ = None
            job.finish(error.with_traceback(None))

    def _retire_older(self, address: Address) -> None:
        newest = self._newest.get(address.identity.replica)
        if newest is not None and newest.fabric_id != address.fabric_id:
            if newest.identity.epoch > address.identity.epoch:
                raise IdentityMismatch(f"{address.identity} was retired by {newest.identity}")
            retired = self._peers.get(newest.fabric_id)
            if retired is not None:
                reason = f"retired by {address.identity}"
                self._guard(retired, lambda: retired.suspend(reason))
        self._newest[address.identity.replica] = address

    def _connected(self, address: Address) -> UcxPeer:
        peer = self._peers.get(address.fabric_id)
        if peer is None:
            peer = UcxPeer(self.worker, address, self.own, self._early)
            self._peers[address.fabric_id] = peer
            self._name()
        return peer

    def _name(self) -> None:
        self.names = tuple(peer.name for peer in self._peers.values())

    def _hear(self, message: Control) -> None:
        peer = self._peers.get(message.sender)
        if peer is not None:
            self._guard(peer, lambda: peer.hear(message))
        elif message.kind == Kind.PING:
            self._connect_back(message)
        else:
            self._early.hear(message)

    def _connect_back(self, message: Control) -> None:
        """Someone means to transfer, and wants to know that this process lives."""
        try:
            address = Address.decode(message.address)
            if len(self._peers) < LINES and address.fabric_id == message.sender:
                self._connected(address).hear(message)
        except (PeerLost, ValueError, self.worker.error):
            # It is gone already, or is none of ours: nobody waits for it here.
            self._peers.pop(message.sender, None)
            self._name()

    def _guard(self, peer: UcxPeer, action: Callable[[], bool | None]) -> bool:
        """Runs `action` of `peer`; when the line turns out to be down, ends it, alone."""
        try:
            return bool(action())
        except (self.worker.error, PeerLost) as error:
            self._lose(peer, error)
            return True

    def _lose(self, peer: UcxPeer, reason: object) -> None:
        self._peers.pop(peer.address.fabric_id, None)
        self._name()
        peer.lost(reason)
