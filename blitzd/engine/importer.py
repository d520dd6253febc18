"""The target's side of a hand-over: reserves blocks, pulls the KV into them, runs.

The target asks the source where the KV lies and fetches it itself, and says how far it has
come for as long as it gets on. Whatever goes wrong, the reservation is freed before the caller
hears of it, as a fault that says which side failed, and why.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Collection
from typing import TYPE_CHECKING

import structlog

from blitzd.engine.calls import to_the_end
from blitzd.engine.errors import CorruptKv, InvalidField, Mismatch, Stalled
from blitzd.engine.exporter import layer_checksums
from blitzd.engine.handover import Fault, fault_of
from blitzd.engine.sources import Sources, peer_of
from blitzd.fabric import Identity, MappedPeers, PeerLost, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import Refused

if TYPE_CHECKING:
    from blitzd.engine.kv_geometry import KvGeometry
    from blitzd.engine.replica import Replica

log = structlog.get_logger()

BEAT_S = 0.25
"""Between two reports of progress, at most; with a stall limit, a quarter of that if less."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """KV of layers [first_layer, last_layer) and who has it; last_layer 0: all."""

    source: Identity
    endpoint: str
    first_layer: int = 0
    last_layer: int = 0

    def layers(self, geometry: "KvGeometry") -> tuple[int, int]:
        return self.first_layer, self.last_layer or geometry.layers


@dataclasses.dataclass(slots=True, eq=False)
class Pull:
    """One import and how far it has come."""

    replica: "Replica"
    message: pb.ImportKvRequest
    request: pb.Request
    parts: tuple[Part, ...]
    deadline: float
    began_ns: int = dataclasses.field(default_factory=time.monotonic_ns)
    stage: str = "waiting for its turn"
    at: int = 0
    """Which part is coming."""
    before: int = 0
    """Bytes of the parts before it."""
    moved: int = 0
    """Bytes; written by the fabric's threads."""
    task: "asyncio.Task[None] | None" = None
    stalled: bool = False

    @property
    def part(self) -> Part:
        return self.parts[self.at]

    @property
    def source(self) -> Identity:
        return self.part.source

    @property
    def lease(self) -> int:
        return self.message.lease_id

    @property
    def tokens(self) -> int:
        """Whose KV is wanted: all but the last, which the next step computes."""
        return len(self.request.prompt_tokens) + len(self.request.output_tokens) - 1

    def export(self, transport: pb.Transport) -> pb.ExportKvRequest:
        return pb.ExportKvRequest(
            request_id=self.request.request_id,
            lease_id=self.lease,
            source_epoch=self.source.epoch,
            transport=transport,
            layout=self.replica.layout,
            first_layer=self.part.first_layer,
            last_layer=self.part.last_layer,
        )

    def on_bytes(self, moved: int) -> None:
        self.moved = self.before + moved

    def report(self) -> pb.ImportKvReport:
        elapsed_ns = time.monotonic_ns() - self.began_ns
        return pb.ImportKvReport(bytes_moved=self.moved, elapsed_ns=elapsed_ns)

    def end(self, error: BaseException | None) -> pb.ImportKvReport:
        report = self.report()
        report.ended = True
        if error is None:
            return report
        report.fault, report.reason = fault_of(error), str(error) or type(error).__name__
        if isinstance(error, CorruptKv):
            report.layer = error.layer
            report.source_checksum, report.target_checksum = error.source, error.target
        elif report.fault is Fault.TARGET:
            log.error("import failed", request=self.request.request_id, exc_info=error)
        return report

    def cancelled(self) -> pb.ImportKvReport:
        report = self.report()
        report.ended, report.fault = True, Fault.CANCELLED
        number = self.request.request_id
        report.reason = f"request_id: {number} was cancelled while it was imported"
        return report


class Importer:
    """One import a request at a time, under the newest lease."""

    def __init__(self, ucx: UcxFabric, sources: Sources, verify: bool) -> None:
        """`verify` compares checksums after every transfer, asked to or not."""
        self._ucx = ucx
        self._verify = verify
        self._sources = sources
        self.mapped = MappedPeers()
        """Arenas of workers on this node."""
        self._running: dict[int, Pull] = {}

    @property
    def request_ids(self) -> list[int]:
        """Of imports under way."""
        return list(self._running)

    @property
    def peers(self) -> list[Identity]:
        """Whose arenas are mapped here."""
        return self.mapped.identities

    async def run(
        self, replica: "Replica", message: pb.ImportKvRequest, deadline: float
    ) -> AsyncGenerator[pb.ImportKvReport]:
        """Reports while bytes move; the last one has `ended`. Raises InvalidField."""
        if message.request is None:
            raise InvalidField("request: missing")
        parts = _parts_of(replica, message)
        pull = Pull(replica, message, message.request, parts, deadline)
        heard = False
        try:
            async for report in self._run(pull):
                yield report
            heard = True
        finally:
            if pull.task is not None and not heard:
                # Nobody hears the answer, so nobody would know that it runs.
                try:
                    await _cancelled(pull.task)
                finally:
                    with replica.steps.exclusive() as stepper:
                        stepper.cancel([pull.request.request_id], up_to_lease=pull.lease)

    async def _run(self, pull: Pull) -> AsyncGenerator[pb.ImportKvReport]:
        try:
            await self._take_over(pull)
        except Refused as error:
            yield pull.end(error)
            return
        task = pull.task = asyncio.create_task(self._import(pull))
        self._running[pull.request.request_id] = pull
        task.add_done_callback(lambda _: self._ended(pull))
        async for report in self._watch(pull, task):
            yield report
        if pull.stalled:
            waited = f"{pull.source}: {pull.stage}; nothing came for {pull.message.stall_ms} ms"
            yield pull.end(Stalled(waited))
        elif task.cancelled():
            yield pull.cancelled()
        else:
            failure = task.exception()
            if isinstance(failure, InvalidField):
                raise failure
            yield pull.end(failure)

    async def _take_over(self, pull: Pull) -> None:
        """Ends what an older lease has of the request here. Raises Refused when that is not
        older."""
        number = pull.request.request_id
        while (other := self._running.get(number)) is not None:
            if other.lease >= pull.lease:
                raise Refused(
                    f"request_id: {number} is being imported already, by lease {other.lease}"
                )
            assert other.task is not None
            await _cancelled(other.task)
            self._ended(other)
        with pull.replica.steps.exclusive() as stepper:
            stepper.cancel([number], up_to_lease=pull.lease - 1)

    def _ended(self, pull: Pull) -> None:
        number = pull.request.request_id
        if self._running.get(number) is pull:
            del self._running[number]

    async def _watch(
        self, pull: Pull, task: "asyncio.Task[None]"
    ) -> AsyncGenerator[pb.ImportKvReport]:
        """Reports as it gets on; ends it when it does not for `stall_ms`."""
        stall_s = pull.message.stall_ms / 1e3
        beat_s = min(BEAT_S, stall_s / 4) if stall_s else BEAT_S
        seen, moved_at = (pull.stage, pull.moved), time.monotonic()
        while True:
            await asyncio.wait([task], timeout=beat_s)
            if task.done():
                return
            now = (pull.stage, pull.moved)
            if now != seen:
                seen, moved_at = now, time.monotonic()
                yield pull.report()
            elif stall_s and time.monotonic() - moved_at >= stall_s:
                pull.stalled = True
                await _cancelled(task)
                # It may have come to its end in the last moment.
                pull.stalled = task.cancelled()
                return

    async def cancel(self, request_ids: Collection[int] | None = None) -> int:
        """Ends imports (None: all). Returns how many there were, their blocks free."""
        wanted = self._running if request_ids is None else request_ids
        pulls = [self._running[i] for i in wanted if i in self._running]
        tasks = [pull.task for pull in pulls if pull.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return len(tasks)

    async def close(self) -> None:
        await self.cancel()
        self.mapped.close()
        self._sources.close()

    async def _import(self, pull: Pull) -> None:
        request_id = pull.request.request_id
        pull.stage = "reserving blocks"
        with pull.replica.steps.exclusive() as stepper:
            blocks = stepper.reserve(pull.request)
        try:
            async with asyncio.timeout(max(0.0, pull.deadline - time.monotonic())):
                for at in range(len(pull.parts)):
                    pull.at = at
                    await self._pull(pull, blocks)
                    pull.before = pull.moved
                if pull.replica.cache.staged:
                    pull.stage = "taking up the KV"
                    await to_the_end(pull.replica.cache.stage_in, blocks)
            # The source's last block ends in what it had before, if anything.
            pull.replica.cache.clear_after(blocks, pull.tokens)
            with pull.replica.steps.exclusive() as stepper:
                stepper.adopt(request_id, pull.lease)
        except TimeoutError:
            raise TimeoutError(f"{pull.source}: {pull.stage}; the deadline passed") from None
        finally:
            # After `adopt` there is nothing to give back.
            with pull.replica.steps.exclusive() as stepper:
                stepper.give_back(request_id)

    async def _pull(self, pull: Pull, blocks: list[int]) -> None:
        transport = pull.message.transport
        verify = self._verify or pull.message.checksums
        call = pull.export(transport)
        call.checksums = verify
        if transport is pb.Transport.UCX:
            pull.stage = "starting UCX"
            await self._ucx.start()
            call.ucx_address, call.ucx_tag = self._ucx.address, self._ucx.new_tag()
        pull.stage = "waiting for ExportKv's answer"
        there = await self._ask(pull, call)
        if there.tokens != pull.tokens or len(there.block_ids) != len(blocks):
            raise Mismatch(
                f"{pull.source} has KV of {there.tokens} tokens in {len(there.block_ids)} "
                f"blocks; the request needs {pull.tokens} tokens in {len(blocks)}"
            )
        pull.stage = "moving the KV"
        if transport is pb.Transport.UCX:
            await self._receive(pull, blocks, there.ucx_address, call.ucx_tag)
        else:
            await self._copy(pull, blocks, there)
            pull.stage = "confirming the lease"
            await self._ask(pull, pull.export(pb.Transport.UNSPECIFIED))
        if verify:
            pull.stage = "comparing checksums"
            await _compare(pull, blocks, there.layer_checksums)

    async def _ask(self, pull: Pull, call: pb.ExportKvRequest) -> pb.ExportKvReply:
        part = pull.part
        try:
            return await self._sources.export(part.source, part.endpoint, call, pull.deadline)
        except PeerLost as error:
            raise PeerLost(f"{error} ({pull.stage})") from error

    async def _copy(self, pull: Pull, blocks: list[int], there: pb.ExportKvReply) -> None:
        ours = pull.replica.geometry
        theirs = dataclasses.replace(ours, blocks=there.blocks_total)
        peer = await self.mapped.get(there.map_path, str(pull.source), pull.deadline)
        layers = pull.part.layers(ours)
        await peer.copy(
            theirs.segments(there.block_ids, layers),
            pull.replica.kv.buffer,
            ours.segments(blocks, layers),
            pull.deadline,
            pull.on_bytes,
        )

    async def _receive(self, pull: Pull, blocks: list[int], address: bytes, tag: int) -> None:
        geometry, buffer = pull.replica.geometry, pull.replica.kv.buffer
        segments = geometry.segments(blocks, pull.part.layers(geometry))
        await self._ucx.receive(address, tag, buffer, segments, pull.deadline, pull.on_bytes)


async def _cancelled(task: "asyncio.Task[None]") -> None:
    """Returns when it has ended, also to a caller that is itself cancelled meanwhile."""
    task.cancel()
    left = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            left = True
    if left:
        raise asyncio.CancelledError


def _parts_of(replica: "Replica", message: pb.ImportKvRequest) -> tuple[Part, ...]:
    """Raises InvalidField."""
    if message.lease_id < 1:
        raise InvalidField(f"lease_id: {message.lease_id}; must be at least 1")
    if message.transport not in (pb.Transport.MAP, pb.Transport.UCX):
        raise InvalidField("transport: unspecified; accepted: TRANSPORT_MAP, TRANSPORT_UCX")
    source = peer_of(
        "source_", message.source_replica, message.source_epoch, message.source_endpoint
    )
    rest, split = message.rest, message.split_layer
    if rest is None:
        return (Part(source, message.source_endpoint),)
    if not 0 < split < replica.geometry.layers:
        raise InvalidField(
            f"split_layer: {split}; with a rest it is in 1..{replica.geometry.layers - 1}"
        )
    other = peer_of("rest.", rest.replica_id, rest.epoch, rest.endpoint)
    return (
        Part(source, message.source_endpoint, 0, split),
        Part(other, rest.endpoint, split, replica.geometry.layers),
    )


async def _compare(pull: Pull, blocks: list[int], theirs: list[int]) -> None:
    geometry, buffer = pull.replica.geometry, pull.replica.kv.buffer
    layers = pull.part.layers(geometry)
    ours = await asyncio.to_thread(layer_checksums, geometry, buffer, blocks, layers)
    if len(theirs) != len(ours):
        raise Mismatch(f"{pull.source} sent {len(theirs)} checksums for {len(ours)} layers")
    for layer, (here, there) in enumerate(zip(ours, theirs, strict=True), layers[0]):
        if here != there:
            told = f"layer {layer} has checksum {here:016x}, the source's is {there:016x}"
            raise CorruptKv(f"KV from {pull.source}: {told}", layer, there, here)
