"""A request moves: its KV is pulled from the worker that prefilled it.

The target asks the source where the KV lies and fetches it itself; the source only answers,
and keeps the blocks until they are released. Whatever goes wrong, the target's reservation is
freed before its caller hears of it, with a status that says which side failed, and why.
"""

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING

import xxhash
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.errors import Corrupt, InvalidField, Mismatch, NotHeld
from blitzd.fabric import Identity, MappedPeers, PeerLost
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import Refused

if TYPE_CHECKING:
    from blitzd.engine.kv_geometry import KvGeometry
    from blitzd.engine.replica import Replica


def layer_checksums(geometry: "KvGeometry", buffer: memoryview, block_ids: list[int]) -> list[int]:
    """xxh3-64 of the KV of `block_ids`, one a layer, in the blocks' order."""
    segments = geometry.segments(block_ids)
    per_layer = len(segments) // geometry.layers
    sums = []
    for layer in range(geometry.layers):
        digest = xxhash.xxh3_64()
        for offset, length in segments[layer * per_layer : (layer + 1) * per_layer]:
            digest.update(buffer[offset : offset + length])
        sums.append(digest.intdigest())
    return sums


class Sources:
    """Channels to other workers, one a replica. A newer epoch retires the older."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[int, str, Channel]] = {}

    def stub(self, source: Identity, endpoint: str) -> pb.EngineStub:
        known = self._channels.get(source.replica)
        if known is not None and known[:2] == (source.epoch, endpoint):
            return pb.EngineStub(known[2])
        if known is not None:
            known[2].close()
        channel = Channel(path=endpoint)
        self._channels[source.replica] = (source.epoch, endpoint, channel)
        return pb.EngineStub(channel)

    def close(self) -> None:
        for _, _, channel in self._channels.values():
            channel.close()
        self._channels.clear()


class Importer:
    """The target's side. One import a request at a time."""

    def __init__(self, verify: bool) -> None:
        """`verify` compares each layer's checksum with the source's after the transfer."""
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
        pull = Pull(replica, request, message, source, deadline, self._verify)
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

    async def cancel(self, request_ids: list[int] | None = None) -> int:
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

    async def _import(self, pull: "Pull") -> pb.ImportKvReply:
        began = time.monotonic_ns()
        request_id = pull.request.request_id
        with pull.replica.steps.exclusive() as stepper:
            blocks = stepper.reserve(pull.request)
        try:
            async with asyncio.timeout(max(0.0, pull.deadline - time.monotonic())):
                moved = await self._pull(pull, blocks)
            with pull.replica.steps.exclusive() as stepper:
                stepper.adopt(request_id)
        except TimeoutError:
            raise TimeoutError(f"{pull.source}: {pull.stage}; the deadline passed") from None
        finally:
            # After `adopt` there is nothing to give back.
            with pull.replica.steps.exclusive() as stepper:
                stepper.give_back(request_id)
        return pb.ImportKvReply(bytes_moved=moved, elapsed_ns=time.monotonic_ns() - began)

    async def _pull(self, pull: "Pull", blocks: list[int]) -> int:
        stub = self._sources.stub(pull.source, pull.message.source_endpoint)
        geometry = pull.replica.geometry
        pull.stage = "waiting for ExportKv's answer"
        there = await _ask(stub, pull, pull.export_request())
        tokens = len(pull.request.prompt_tokens) + len(pull.request.output_tokens) - 1
        if there.tokens != tokens or len(there.block_ids) != len(blocks):
            raise Mismatch(
                f"{pull.source} has KV of {there.tokens} tokens in {len(there.block_ids)} blocks; "
                f"the request needs {tokens} tokens in {len(blocks)}"
            )
        pull.stage = "moving the KV"
        theirs = dataclasses.replace(geometry, blocks=there.blocks_total)
        peer = await self._mapped.get(there.map_path, str(pull.source), pull.deadline)
        moved = await peer.copy(
            theirs.segments(there.block_ids),
            pull.replica.kv.buffer,
            geometry.segments(blocks),
            pull.deadline,
        )
        pull.stage = "confirming the lease"
        await _ask(stub, pull, pull.export_request(pb.Transport.UNSPECIFIED))
        if pull.verify:
            pull.stage = "comparing checksums"
            await _compare(pull, blocks, list(there.layer_checksums))
        return moved


@dataclasses.dataclass(slots=True)
class Pull:
    """One import and how far it has come."""

    replica: "Replica"
    request: pb.Request
    message: pb.ImportKvRequest
    source: Identity
    deadline: float
    verify: bool
    stage: str = "reserving blocks"

    def export_request(self, transport: pb.Transport | None = None) -> pb.ExportKvRequest:
        return pb.ExportKvRequest(
            request_id=self.request.request_id,
            lease_id=self.message.lease_id,
            source_epoch=self.source.epoch,
            transport=self.message.transport if transport is None else transport,
            layout=self.replica.layout,
            checksums=self.verify,
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
    if message.transport is pb.Transport.UNSPECIFIED:
        raise InvalidField("transport: unspecified; accepted: TRANSPORT_MAP, TRANSPORT_UCX")
    return source


async def _ask(stub: pb.EngineStub, pull: Pull, request: pb.ExportKvRequest) -> pb.ExportKvReply:
    try:
        return await stub.export_kv(request, timeout=max(0.0, pull.deadline - time.monotonic()))
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


class Exporter:
    """The source's side: says where a held request's KV lies, to one lease at a time."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._leases: dict[int, int] = {}

    async def run(
        self, replica: "Replica", message: pb.ExportKvRequest, map_path: str
    ) -> pb.ExportKvReply:
        """Raises NotHeld (unknown request, other epoch, older lease), Mismatch."""
        if message.source_epoch != self._identity.epoch:
            raise NotHeld(f"source_epoch: {message.source_epoch}; this is {self._identity}")
        if message.layout != replica.layout:
            raise Mismatch(
                f"layout: {message.layout}; {self._identity} has {replica.layout}: another "
                "model, dtype or block size"
            )
        with replica.steps.exclusive() as stepper:
            tokens, blocks = stepper.held(message.request_id)
        self._grant(message)
        checksums = []
        if message.checksums and message.transport is not pb.Transport.UNSPECIFIED:
            checksums = await asyncio.to_thread(
                layer_checksums, replica.geometry, replica.kv.buffer, blocks
            )
        return pb.ExportKvReply(
            tokens=tokens,
            block_ids=blocks,
            map_path=map_path,
            blocks_total=replica.geometry.blocks,
            layer_checksums=checksums,
        )

    def _grant(self, message: pb.ExportKvRequest) -> None:
        """A newer lease takes over: the daemon tried another target. An older one is dead."""
        current = self._leases.get(message.request_id, 0)
        confirms = message.transport is pb.Transport.UNSPECIFIED
        if message.lease_id < current or (confirms and message.lease_id != current):
            raise NotHeld(
                f"lease_id: {message.lease_id}; request {message.request_id} is leased to "
                f"{current or 'nobody'}"
            )
        self._leases[message.request_id] = message.lease_id

    def forget(self, request_ids: list[int] | None = None) -> None:
        """Ends the leases of requests (None: all) that are about to be freed."""
        for request_id in list(self._leases) if request_ids is None else request_ids:
            self._leases.pop(request_id, None)
