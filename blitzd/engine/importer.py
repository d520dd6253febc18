"""The target's side of a hand-over: reserves blocks, pulls the KV into them, runs.

The target asks the source where the KV lies and fetches it itself. Whatever goes wrong, the
reservation is freed before the caller hears of it, with a status that says which side
failed, and why.
"""

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.calls import to_the_end
from blitzd.engine.errors import Corrupt, InvalidField, Mismatch
from blitzd.engine.exporter import layer_checksums
from blitzd.fabric import Identity, MappedPeers, PeerLost, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import Refused

if TYPE_CHECKING:
    from blitzd.engine.replica import Replica


CHANNELS = 64
"""To other workers, the least recently used ends first. More than a replica has sources."""


class Sources:
    """Channels to other workers. A source checks its epoch by itself."""

    def __init__(self) -> None:
        self._channels: OrderedDict[str, Channel] = OrderedDict()

    def stub(self, endpoint: str) -> pb.EngineStub:
        channel = self._channels.pop(endpoint, None) or Channel(path=endpoint)
        self._channels[endpoint] = channel
        if len(self._channels) > CHANNELS:
            self._channels.popitem(last=False)[1].close()
        return pb.EngineStub(channel)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


@dataclasses.dataclass(slots=True)
class Pull:
    """One import and how far it has come."""

    replica: "Replica"
    message: pb.ImportKvRequest
    request: pb.Request
    source: Identity
    deadline: float
    stage: str = "reserving blocks"

    @property
    def tokens(self) -> int:
        """Whose KV is wanted: all but the last, which the next step computes."""
        return len(self.request.prompt_tokens) + len(self.request.output_tokens) - 1

    def export(self, transport: pb.Transport) -> pb.ExportKvRequest:
        return pb.ExportKvRequest(
            request_id=self.request.request_id,
            lease_id=self.message.lease_id,
            source_epoch=self.source.epoch,
            transport=transport,
            layout=self.replica.layout,
        )


class Importer:
    """One import a request at a time."""

    def __init__(self, ucx: UcxFabric, verify: bool) -> None:
        """`verify` compares each layer's checksum with the source's after the transfer."""
        self._ucx = ucx
        self._verify = verify
        self._sources = Sources()
        self._mapped = MappedPeers()
        self._running: dict[int, asyncio.Task[pb.ImportKvReply]] = {}

    async def run(
        self, replica: "Replica", message: pb.ImportKvRequest, deadline: float
    ) -> pb.ImportKvReply:
        """Returns when the KV is here and the request runs.

        Raises InvalidField, Refused, NoRoom; PeerLost (the source is gone), NotHeld (it does
        not have the KV), Mismatch, Corrupt, TimeoutError; GRPCError CANCELLED.
        """
        request = message.request
        if request is None:
            raise InvalidField("request: missing")
        source = _source_of(message)
        if request.request_id in self._running:
            raise Refused(f"request_id: {request.request_id} is being imported already")
        pull = Pull(replica, message, request, source, deadline)
        task = asyncio.create_task(self._import(pull))
        self._running[request.request_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                # Nobody hears the answer, so nobody would know that it runs.
                with replica.steps.exclusive() as stepper:
                    stepper.cancel([request.request_id])
                raise
            reason = f"request_id: {request.request_id} was cancelled while it was imported"
            raise GRPCError(Status.CANCELLED, reason) from None
        finally:
            del self._running[request.request_id]

    async def cancel(self, request_ids: Collection[int] | None = None) -> int:
        """Ends imports (None: all) and returns how many there were, their blocks free."""
        wanted = self._running if request_ids is None else request_ids
        tasks = [self._running[i] for i in wanted if i in self._running]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return len(tasks)

    async def close(self) -> None:
        await self.cancel()
        self._mapped.close()
        self._sources.close()

    async def _import(self, pull: Pull) -> pb.ImportKvReply:
        began = time.monotonic_ns()
        request_id = pull.request.request_id
        with pull.replica.steps.exclusive() as stepper:
            blocks = stepper.reserve(pull.request)
        try:
            async with asyncio.timeout(max(0.0, pull.deadline - time.monotonic())):
                moved = await self._pull(pull, blocks)
                if pull.replica.cache.staged:
                    pull.stage = "taking up the KV"
                    await to_the_end(pull.replica.cache.stage_in, blocks)
            with pull.replica.steps.exclusive() as stepper:
                stepper.adopt(request_id)
        except TimeoutError:
            raise TimeoutError(f"{pull.source}: {pull.stage}; the deadline passed") from None
        finally:
            # After `adopt` there is nothing to give back.
            with pull.replica.steps.exclusive() as stepper:
                stepper.give_back(request_id)
        return pb.ImportKvReply(bytes_moved=moved, elapsed_ns=time.monotonic_ns() - began)

    async def _pull(self, pull: Pull, blocks: list[int]) -> int:
        transport = pull.message.transport
        call = pull.export(transport)
        call.checksums = self._verify
        if transport is pb.Transport.UCX:
            pull.stage = "starting UCX"
            await self._ucx.start()
            call.ucx_address, call.ucx_tag = self._ucx.address, self._ucx.new_tag()
        stub = self._sources.stub(pull.message.source_endpoint)
        pull.stage = "waiting for ExportKv's answer"
        there = await _ask(stub, pull, call)
        if there.tokens != pull.tokens or len(there.block_ids) != len(blocks):
            raise Mismatch(
                f"{pull.source} has KV of {there.tokens} tokens in {len(there.block_ids)} "
                f"blocks; the request needs {pull.tokens} tokens in {len(blocks)}"
            )
        pull.stage = "moving the KV"
        if transport is pb.Transport.UCX:
            moved = await self._receive(pull, blocks, there.ucx_address, call.ucx_tag)
        else:
            moved = await self._copy(pull, blocks, there)
            pull.stage = "confirming the lease"
            await _ask(stub, pull, pull.export(pb.Transport.UNSPECIFIED))
        if self._verify:
            pull.stage = "comparing checksums"
            await _compare(pull, blocks, there.layer_checksums)
        return moved

    async def _copy(self, pull: Pull, blocks: list[int], there: pb.ExportKvReply) -> int:
        ours = pull.replica.geometry
        theirs = dataclasses.replace(ours, blocks=there.blocks_total)
        peer = await self._mapped.get(there.map_path, str(pull.source), pull.deadline)
        return await peer.copy(
            theirs.segments(there.block_ids),
            pull.replica.kv.buffer,
            ours.segments(blocks),
            pull.deadline,
        )

    async def _receive(self, pull: Pull, blocks: list[int], address: bytes, tag: int) -> int:
        segments = pull.replica.geometry.segments(blocks)
        return await self._ucx.receive(
            address, tag, pull.replica.kv.buffer, segments, pull.deadline
        )


def _source_of(message: pb.ImportKvRequest) -> Identity:
    try:
        source = Identity.parse(f"{message.source_replica}/{message.source_epoch}")
    except ValueError as error:
        raise InvalidField(f"source_replica, source_epoch: {error}") from None
    if not message.source_endpoint:
        raise InvalidField("source_endpoint: empty; the path of the source's socket is needed")
    if message.lease_id < 1:
        raise InvalidField(f"lease_id: {message.lease_id}; must be at least 1")
    if message.transport not in (pb.Transport.MAP, pb.Transport.UCX):
        raise InvalidField("transport: unspecified; accepted: TRANSPORT_MAP, TRANSPORT_UCX")
    return source


async def _ask(stub: pb.EngineStub, pull: Pull, call: pb.ExportKvRequest) -> pb.ExportKvReply:
    try:
        return await stub.export_kv(call, timeout=max(0.0, pull.deadline - time.monotonic()))
    except GRPCError as error:
        raise GRPCError(error.status, f"{pull.source}: {error.message}") from error
    except TimeoutError:  # an OSError, but not of the source's making
        raise
    except (OSError, StreamTerminatedError) as error:
        reason = str(error) or type(error).__name__
        raise PeerLost(f"{pull.source} is gone: {reason} ({pull.stage})") from error


async def _compare(pull: Pull, blocks: list[int], theirs: list[int]) -> None:
    geometry, buffer = pull.replica.geometry, pull.replica.kv.buffer
    ours = await asyncio.to_thread(layer_checksums, geometry, buffer, blocks)
    wrong = [layer for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    if wrong:
        raise Corrupt(f"KV from {pull.source}: layers {wrong} do not have the source's checksum")
