"""The two workers of a live pair: Old asks New for its earliest request and goes on with it.

New keeps a request, and its hidden states, until Old has said that it has its own; so a request
is run by one of the two, and by New again when Old is heard of no more.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.errors import InvalidField, Mismatch, NotHeld, OtherEpoch
from blitzd.engine.handover import SAID_BY_SOURCE, Fault, fault_of
from blitzd.engine.live_plan import LivePlanner
from blitzd.engine.sources import Sources, peer_of
from blitzd.fabric import FabricError, Identity, MappedPeers, PeerLost, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import NoRoom, Refused
from blitzd.sched.zigzag import Policy

if TYPE_CHECKING:
    from blitzd.engine.live import LiveRequest
    from blitzd.engine.live_stepper import LiveStepper
    from blitzd.engine.replica import Replica

log = structlog.get_logger()

WAIT_MS = 2000
"""Of one TakeRelay."""
ACK_S = 5.0
"""From the answer to TakeRelay to AckRelay: hidden states are moved in milliseconds."""
FOLLOW_ENDS = (FabricError, NotHeld, OtherEpoch, Mismatch, TimeoutError)
"""What a FollowLive may end with, as a fault of its reply."""
REST_S = 0.05
"""After a request that Old could not take."""


class RelaySource:
    """New's side."""

    def __init__(self, identity: Identity, ucx: UcxFabric) -> None:
        self._identity = identity
        self._ucx = ucx
        self._changed = asyncio.Event()
        self._asking = asyncio.Lock()
        self._unacknowledged: dict[int, asyncio.TimerHandle] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._planner: LivePlanner | None = None

    def watch(self, replica: "Replica", loop: asyncio.AbstractEventLoop) -> None:
        """Hears of answers that get ready on the step loop's thread, and plans if it is to."""
        with replica.steps.exclusive() as stepper:
            live = stepper.live
            live.changed = lambda: _wake(loop, self._changed)
            if live.policy is Policy.ILP and not live.loaded:
                self._planner = LivePlanner(replica.steps)
                live.replan = self._planner.replan

    async def take(
        self, replica: "Replica", message: pb.TakeRelayRequest, map_path: str
    ) -> pb.TakeRelayReply:
        """The answer of TakeRelay; with a fault EPOCH, MISMATCH or NOT_HELD."""
        try:
            self._check_epoch(message.source_epoch)
            if message.layout != replica.layout:
                raise Mismatch(f"layout: {message.layout}; {self._identity} has {replica.layout}")
            async with self._asking:
                return await self._take(replica, message, map_path)
        except (OtherEpoch, Mismatch, NotHeld) as error:
            return pb.TakeRelayReply(fault=fault_of(error), reason=str(error))

    async def _take(
        self, replica: "Replica", message: pb.TakeRelayRequest, map_path: str
    ) -> pb.TakeRelayReply:
        if message.transport is pb.Transport.UCX:
            await self._ucx.start()
        one, drained = await self._next(replica, message.wait_ms / 1e3)
        reply = pb.TakeRelayReply(drained=drained)
        if one is None:
            return reply
        loop = asyncio.get_running_loop()
        timer = loop.call_later(ACK_S, self._withdraw, replica, one.id)
        self._unacknowledged[one.id] = timer
        reply.request, reply.layers_done = one.request, one.done
        if one.slot is None:
            return reply
        offset, reply.length = replica.slots.segment(one.slot)
        reply.offset = replica.geometry.bytes + offset
        reply.map_path = map_path
        if message.transport is pb.Transport.UCX:
            reply.ucx_address = self._ucx.address
            sending = loop.create_task(self._send(replica, message, reply))
            self._sends.add(sending)
            sending.add_done_callback(self._sends.discard)
        return reply

    async def _next(self, replica: "Replica", wait_s: float) -> tuple["LiveRequest | None", bool]:
        """(what Old gets, whether there will never be anything)."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    self._changed.clear()
                    with replica.steps.exclusive() as stepper:
                        one = stepper.live.ask()
                        if one is not None:
                            stepper.live.sent()
                            return one, False
                        if stepper.live.drained:
                            return None, True
                    await self._changed.wait()
        except TimeoutError:
            return None, False
        finally:
            with replica.steps.exclusive() as stepper:
                stepper.live.unask()

    async def _send(
        self, replica: "Replica", message: pb.TakeRelayRequest, reply: pb.TakeRelayReply
    ) -> None:
        segments = [(reply.offset, reply.length)]
        buffer, deadline = replica.kv.buffer, time.monotonic() + ACK_S
        try:
            await self._ucx.send(message.ucx_address, message.ucx_tag, buffer, segments, deadline)
        except (FabricError, ValueError) as error:
            log.warning("hidden states were not sent", error=str(error))

    def acknowledge(self, replica: "Replica", message: pb.AckRelayRequest) -> pb.AckRelayReply:
        """Raises OtherEpoch."""
        self._check_epoch(message.source_epoch)
        timer = self._unacknowledged.pop(message.request_id, None)
        if timer is None:
            return pb.AckRelayReply()
        timer.cancel()
        with replica.steps.exclusive() as stepper:
            if message.refused:
                stepper.live.withdraw(message.request_id)
                return pb.AckRelayReply()
            try:
                stepper.acknowledged(message.request_id)
            except NotHeld:  # cancelled meanwhile
                return pb.AckRelayReply()
        # The daemon may send the next one: not only when a layer ends that is running.
        replica.steps.report()
        return pb.AckRelayReply(granted=True)

    def _withdraw(self, replica: "Replica", request_id: int) -> None:
        self._unacknowledged.pop(request_id, None)
        with replica.steps.exclusive() as stepper:
            stepper.live.withdraw(request_id)
        log.warning("a request was not taken over", request=request_id, after_s=ACK_S)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._identity.epoch:
            raise OtherEpoch(f"source_epoch: {epoch}; this is {self._identity}")

    async def close(self) -> None:
        for timer in self._unacknowledged.values():
            timer.cancel()
        self._unacknowledged.clear()
        if self._planner is not None:
            await self._planner.close()
            self._planner = None
        for sending in list(self._sends):
            sending.cancel()
        if self._sends:
            await asyncio.wait(list(self._sends))


class RelayFollower:
    """Old's side."""

    def __init__(self, ucx: UcxFabric, sources: Sources, mapped: MappedPeers) -> None:
        self._ucx = ucx
        self._mapped = mapped
        self._sources = sources
        self._free = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Follows nobody any more. Returns when nothing is written here."""
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def close(self) -> None:
        await self.stop()
        self._sources.close()

    def moved(self) -> None:
        """Something ended here, so that another may come."""
        self._free.set()

    async def follow(
        self, replica: "Replica", message: pb.FollowLiveRequest, deadline: float
    ) -> pb.FollowLiveReply:
        """Until the other is drained, `stop`, or something fails. Raises InvalidField."""
        source = peer_of(
            "source_", message.source_replica, message.source_epoch, message.source_endpoint
        )
        if message.transport not in (pb.Transport.MAP, pb.Transport.UCX):
            raise InvalidField("transport: unspecified; accepted: TRANSPORT_MAP, TRANSPORT_UCX")
        loop = asyncio.get_running_loop()
        with replica.steps.exclusive() as stepper:
            stepper.live.ending = lambda: _wake(loop, self._free)
        pair = _Following(self, replica, message, source, deadline)
        reply = pb.FollowLiveReply()
        task = asyncio.create_task(pair.run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            await asyncio.wait([task])
        reply.taken = pair.taken
        if task.cancelled():
            reply.fault, reply.reason = Fault.CANCELLED, "this worker was reset"
        elif (error := task.exception()) is not None:
            if not isinstance(error, FOLLOW_ENDS):
                raise error
            reply.fault, reply.reason = fault_of(error), str(error) or "the deadline passed"
        return reply


class _Following:
    """One FollowLive."""

    def __init__(
        self,
        follower: RelayFollower,
        replica: "Replica",
        message: pb.FollowLiveRequest,
        source: Identity,
        deadline: float,
    ) -> None:
        self.taken = 0
        self._follower = follower
        self._replica = replica
        self._message = message
        self._source = source
        self._deadline = deadline

    async def run(self) -> None:
        async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
            while await self.one():
                pass
            await self._until(lambda stepper: stepper.idle)

    async def one(self) -> bool:
        """Takes a request over, if there is one. False when nothing will come."""
        await self._until(lambda stepper: stepper.takes_more)
        call = pb.TakeRelayRequest(
            source_epoch=self._source.epoch,
            layout=self._replica.layout,
            transport=self._message.transport,
            wait_ms=WAIT_MS,
        )
        if call.transport is pb.Transport.UCX:
            ucx = self._follower._ucx
            await ucx.start()
            call.ucx_address, call.ucx_tag = ucx.address, ucx.new_tag()
        there = await self._ask(call)
        if there.request is not None:
            await self._take(there.request, there, call.ucx_tag)
        return not there.drained

    async def _until(self, free: Callable[["LiveStepper"], bool]) -> None:
        while True:
            self._follower._free.clear()
            with self._replica.steps.exclusive() as stepper:
                if free(stepper):
                    return
            await self._follower._free.wait()

    async def _ask(self, call: pb.TakeRelayRequest) -> pb.TakeRelayReply:
        stub = self._stub
        try:
            reply = await stub.take_relay(call, timeout=WAIT_MS / 1e3 + ACK_S)
        except (GRPCError, StreamTerminatedError, OSError) as error:
            raise PeerLost(f"{self._source}: TakeRelay: {error}") from error
        if reply.fault in SAID_BY_SOURCE:
            raise SAID_BY_SOURCE[reply.fault](f"{self._source}: {reply.reason}")
        return reply

    @property
    def _stub(self) -> pb.EngineStub:
        return self._follower._sources.stub(self._source, self._message.source_endpoint)

    async def _take(self, request: pb.Request, there: pb.TakeRelayReply, tag: int) -> None:
        steps = self._replica.steps
        try:
            with steps.exclusive() as stepper:
                one = stepper.expect(request, there.layers_done)
        except (NoRoom, Refused, InvalidField) as error:
            log.warning("not taken over", request=request.request_id, error=str(error))
            await self._ack(request.request_id, refused=True)
            await asyncio.sleep(REST_S)
            return
        granted = False
        try:
            if one.slot is not None:
                await self._move(one.slot, there, tag)
            granted = await self._ack(request.request_id, refused=False)
        finally:
            with steps.exclusive() as stepper:
                if granted:
                    with contextlib.suppress(NotHeld):
                        stepper.live.arrived(request.request_id)
                        self.taken += 1
                else:
                    stepper.live.never_came(request.request_id)

    async def _move(self, slot: int, there: pb.TakeRelayReply, tag: int) -> None:
        replica, follower = self._replica, self._follower
        offset, length = replica.slots.segment(slot)
        if length != there.length:
            raise Mismatch(
                f"{self._source} has {there.length} bytes of hidden states, not {length}"
            )
        ours = [(replica.geometry.bytes + offset, length)]
        deadline, buffer = time.monotonic() + ACK_S, replica.kv.buffer
        if self._message.transport is pb.Transport.UCX:
            await follower._ucx.receive(there.ucx_address, tag, buffer, ours, deadline)
            return
        peer = await follower._mapped.get(there.map_path, str(self._source), deadline)
        await peer.copy([(there.offset, there.length)], buffer, ours, deadline)

    async def _ack(self, request_id: int, *, refused: bool) -> bool:
        call = pb.AckRelayRequest(
            source_epoch=self._source.epoch, request_id=request_id, refused=refused
        )
        try:
            return (await self._stub.ack_relay(call, timeout=ACK_S)).granted
        except (GRPCError, StreamTerminatedError, OSError) as error:
            raise PeerLost(f"{self._source}: AckRelay: {error}") from error


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
