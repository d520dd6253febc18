"""The line to one peer: its endpoint, what is open over it, and the watch on its pulse."""

from collections import OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from blitzd.fabric.errors import FabricError, PeerLost
from blitzd.fabric.staging import Slot, SlotPool
from blitzd.fabric.ucx_transfer import Incoming, Job, Outgoing
from blitzd.fabric.ucx_wire import CONTROL_TAG, Address, Control, Kind, data_tag
from blitzd.fabric.ucx_worker import UcxWorker

STALL_S = 0.5
"""A peer with something open that is silent for so long is given up on."""
PING_S = 0.1
EARLY_LIMIT = 256
CLOSE_NS = 100_000_000

T = TypeVar("T", Outgoing, Incoming)


@dataclass(slots=True)
class Early:
    """Word of a transfer that this side has not begun."""

    granted: int = 0
    expected: int = 0
    over: bool = False
    """The other side gave up."""
    done: bool = False
    """The receiver, which expected nothing, has it all."""


class EarlyWords:
    """The latest `EARLY_LIMIT` of them, over all peers."""

    def __init__(self) -> None:
        self._words: OrderedDict[int, Early] = OrderedDict()

    def at(self, tag: int) -> Early:
        word = self._words.setdefault(tag, Early())
        self._words.move_to_end(tag)
        if len(self._words) > EARLY_LIMIT:
            self._words.popitem(last=False)
        return word

    def pop(self, tag: int) -> Early:
        return self._words.pop(tag, Early())

    def hear(self, message: Control) -> None:
        """Takes word of a transfer that is not open here."""
        if message.kind == Kind.GRANT:
            word = self.at(message.tag)
            word.granted = max(word.granted, message.value)
            word.expected = message.total
        elif message.kind in (Kind.CANCEL, Kind.FAIL):
            self.at(message.tag).over = True
        elif message.kind == Kind.DONE:
            word = self.at(message.tag)
            word.done, word.expected = True, message.total


class UcxPeer:
    """One life of one peer. Once `lost`, it is never used again."""

    def __init__(
        self,
        worker: UcxWorker,
        address: Address,
        own: Address,
        early: EarlyWords,
    ) -> None:
        """Connects, and asks the peer to connect back.

        Raises PeerLost when UCX sees at once that nobody is there.
        """
        self.address = address
        self.name = str(address.identity)
        self.slots_out: SlotPool = worker.slots_out
        self.slots_in: SlotPool = worker.slots_in
        self.flying = 0
        self._worker = worker
        self._own = own
        self._suspended = False
        self._lent = (0, 0)
        """Slots of the two pools that are stuck with a silent peer."""
        self._early = early
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._speaking: deque[tuple[Any, Any]] = deque()
        """Small sends in flight, with the memory that they read."""
        self._heard = worker.now
        self._pinged = 0.0
        self._void = worker.array(np.zeros(1, dtype=np.uint8))
        try:
            self._endpoint = worker.connect(address.worker)
            self._ping()
        except worker.error as error:
            raise PeerLost(f"{self.name}: {error}") from error

    @property
    def busy(self) -> bool:
        """Something is open that is to be watched."""
        return bool(self._outgoing or self._incoming) and not self._suspended

    # What transfers ask for.

    def control(self, kind: Kind, tag: int = 0, value: int = 0, total: int = 0) -> None:
        self._say(Control(kind, self._own.fabric_id, tag, value, total))

    def send(self, tag: int, slot: Slot, size: int) -> Any:
        array = slot.array if size == len(slot.bytes) else self._worker.array(slot.bytes[:size])
        return self._worker.send(self._endpoint, array, tag)

    def send_void(self, tag: int) -> None:
        request = self._worker.send(self._endpoint, self._void, tag)
        self._speaking.append((request, self._void))

    def receive(self, tag: int, slot: Slot) -> Any:
        return self._worker.receive(self._endpoint, slot.array, tag)

    def retire(self, request: Any, pool: SlotPool, slot: Slot) -> None:
        self._worker.retire(request, pool, slot)

    def _say(self, message: Control) -> None:
        array = self._worker.array(np.frombuffer(message.encode(), dtype=np.uint8))
        self._speaking.append((self._worker.send(self._endpoint, array, CONTROL_TAG), array))

    def _ping(self) -> None:
        self._say(Control(Kind.PING, self._own.fabric_id, address=self._own.encode()))
        self._pinged = self._worker.now

    # What the fabric asks for.

    def start_sending(self, job: Job) -> None:
        early = self._early.pop(job.tag)
        if early.over:
            job.finish(PeerLost(f"{self.name} gave the transfer up"))
            return
        self._refuse_twice(self._outgoing, job)
        transfer = Outgoing(job, self)
        if early.done:
            transfer.done(early.expected)
            return
        self._open_up(self._outgoing, transfer)
        if early.granted:
            transfer.grant(early.granted, early.expected)

    def start_receiving(self, job: Job) -> None:
        if self._early.pop(job.tag).over:
            job.finish(PeerLost(f"{self.name} gave the transfer up"))
            return
        self._refuse_twice(self._incoming, job)
        self._open_up(self._incoming, Incoming(job, self))

    def _refuse_twice(self, among: Container[int], job: Job) -> None:
        if job.tag in among:
            raise FabricError(f"tag {job.tag} is in use with {self.name}; draw one a transfer")

    def _open_up(self, among: dict[int, T], transfer: T) -> None:
        was_idle = not self.busy
        # Before anything is said: if the line turns out to be down, the caller hears of it.
        among[transfer.job.tag] = transfer
        if was_idle:
            self._alive()
            self._ping()

    def give_up(self, tag: int, error: FabricError) -> None:
        for transfer in (self._outgoing.get(tag), self._incoming.get(tag)):
            if transfer is not None:
                transfer.give_up(error)

    def hear(self, message: Control) -> None:
        """Takes a control message of this peer."""
        self._alive()
        if message.kind == Kind.FAIL:
            self._hear_sender(message, self._incoming.get(message.tag))
        elif message.kind == Kind.PING:
            self.control(Kind.PONG)
        elif message.kind != Kind.PONG:
            self._hear_receiver(message, self._outgoing.get(message.tag))

    def _hear_sender(self, message: Control, receiving: Incoming | None) -> None:
        if receiving is not None:
            receiving.failed(message.value)
        else:
            self._early.hear(message)
            self.control(Kind.DONE, message.tag)

    def _hear_receiver(self, message: Control, sending: Outgoing | None) -> None:
        if sending is None:
            if message.kind == Kind.CANCEL and not self._early.at(message.tag).over:
                for _ in range(self._early.at(message.tag).granted):
                    self.send_void(data_tag(message.tag))
            self._early.hear(message)
        elif message.kind == Kind.GRANT:
            sending.grant(message.value, message.total)
        elif message.kind == Kind.CANCEL:
            sending.cancelled()
        else:
            sending.done(message.total)

    def sweep(self) -> bool:
        """Moves everything that can move; True when something did.

        Raises the binding's error, or PeerLost, when the line is down: call `lost` then.
        """
        if not self._endpoint.alive:
            self._endpoint.raise_on_error()
            raise PeerLost("the endpoint was closed")
        while self._speaking and self._speaking[0][0].completed:
            request, _ = self._speaking.popleft()
            request.check_error()
        moved = False
        for outgoing in list(self._outgoing.values()):
            moved |= outgoing.pump()
            if outgoing.closed:
                del self._outgoing[outgoing.job.tag]
        for incoming in list(self._incoming.values()):
            if incoming.pump():
                self._alive()
                moved = True
            if incoming.closed:
                del self._incoming[incoming.job.tag]
        return moved

    def tick(self) -> None:
        """Deadlines, pings and the watchdog."""
        if not self.busy:
            return
        now = self._worker.now
        for transfer in self._open():
            transfer.expire(now)
        if now - self._heard >= STALL_S:
            self.suspend(f"no sign of life for {now - self._heard:.2f} s")
        elif now - self._pinged >= PING_S:
            self._ping()

    def suspend(self, reason: str) -> None:
        """Ends all that is open, for the callers; the line stays.

        It is not closed: to end an endpoint below which the connection still stands, and
        to connect to the same process again, can crash UCX 1.21 (an event for a connection
        that an earlier event of the same batch has freed). When the peer comes back it finds
        each transfer given up in good order; when it dies, the endpoint says so.
        """
        for transfer in self._open():
            transfer.give_up(PeerLost(f"{self.name}: {reason}"))
        if not self._suspended:
            self._suspended = True
            self._lent = (
                sum(outgoing.slots for outgoing in self._outgoing.values()),
                sum(incoming.slots for incoming in self._incoming.values()),
            )
            self.slots_out.extend(self._lent[0])
            self.slots_in.extend(self._lent[1])

    def _alive(self) -> None:
        self._heard = self._worker.now
        if self._suspended:
            self._suspended = False
            self.slots_out.extend(-self._lent[0])
            self.slots_in.extend(-self._lent[1])

    def _open(self) -> list[Outgoing | Incoming]:
        return [*self._outgoing.values(), *self._incoming.values()]

    def excuse(self) -> None:
        """The peer's silence so far is not held against it."""
        self._heard = self._worker.now

    def lost(self, reason: object) -> None:
        """The endpoint is down: ends everything open over it. Other peers do not notice."""
        self._alive()
        error = PeerLost(f"{self.name}: {reason}")
        for transfer in self._open():
            transfer.lost(error)
        for request, array in self._speaking:
            self._worker.retire(request, None, array)
        self._outgoing.clear()
        self._incoming.clear()
        self._speaking.clear()
        self._worker.disconnect(self._endpoint, CLOSE_NS)
