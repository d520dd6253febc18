"""The source's side of a hand-over: says where a held request's KV lies, to one lease at a
time, and sends it where nothing can be mapped."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Coroutine
from typing import TYPE_CHECKING

import structlog
import xxhash

from blitzd.engine.calls import to_the_end
from blitzd.engine.errors import Mismatch, NotHeld, OtherEpoch
from blitzd.engine.handover import SAID_BY_SOURCE, fault_of
from blitzd.fabric import FabricError, Identity, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb

if TYPE_CHECKING:
    from blitzd.engine.kv_geometry import KvGeometry
    from blitzd.engine.replica import Replica

log = structlog.get_logger()


def layer_checksums(
    geometry: "KvGeometry",
    buffer: memoryview,
    block_ids: list[int],
    layers: tuple[int, int] | None = None,
) -> list[int]:
    """xxh3-64 of the KV of `block_ids`, one a layer of [first, last), in the blocks' order."""
    first, last = layers or (0, geometry.layers)
    segments = geometry.segments(block_ids, (first, last))
    per_layer = len(segments) // (last - first)
    sums = []
    for layer in range(last - first):
        digest = xxhash.xxh3_64()
        for offset, length in segments[layer * per_layer : (layer + 1) * per_layer]:
            digest.update(buffer[offset : offset + length])
        sums.append(digest.intdigest())
    return sums


def _layers(replica: "Replica", message: pb.ExportKvRequest) -> tuple[int, int]:
    """[first, last) that are asked for. Raises Mismatch when there are no such layers."""
    first, last = message.first_layer, message.last_layer or replica.geometry.layers
    if not first < last <= replica.geometry.layers:
        raise Mismatch(
            f"first_layer, last_layer: [{first}, {last}); the model has {replica.geometry.layers}"
        )
    return first, last


class Exporter:
    def __init__(self, identity: Identity, ucx: UcxFabric) -> None:
        self._identity = identity
        self._ucx = ucx
        self._leases: dict[int, int] = {}
        self._sends: dict[int, asyncio.Task[None]] = {}
        self._freeing: set[int] = set()
        self._freeing_all = 0

    @property
    def leased(self) -> list[int]:
        """Requests that a target has a lease for."""
        return list(self._leases)

    @property
    def transfers(self) -> int:
        """Under way from here."""
        return len(self._sends)

    async def run(
        self, replica: "Replica", message: pb.ExportKvRequest, map_path: str, deadline: float
    ) -> pb.ExportKvReply:
        """Where the KV of a held request lies; over UCX, it is on its way by then. Or why the
        target does not get it: `fault` NOT_HELD (unknown request, older lease), EPOCH,
        MISMATCH."""
        try:
            return await self._export(replica, message, map_path, deadline)
        except tuple(SAID_BY_SOURCE.values()) as error:
            return pb.ExportKvReply(fault=fault_of(error), reason=str(error))

    async def _export(
        self, replica: "Replica", message: pb.ExportKvRequest, map_path: str, deadline: float
    ) -> pb.ExportKvReply:
        request_id = message.request_id
        if message.source_epoch != self._identity.epoch:
            raise OtherEpoch(f"source_epoch: {message.source_epoch}; this is {self._identity}")
        if message.layout != replica.layout:
            raise Mismatch(
                f"layout: {message.layout}; {self._identity} has {replica.layout}: another "
                "model, dtype or block size"
            )
        moves = message.transport is not pb.Transport.UNSPECIFIED
        self._grant(replica, message, moves)
        if moves:
            # Of an older lease: its target is given up.
            await self._stop(request_id)
        if message.transport is pb.Transport.UCX:
            await self._ucx.start()
        if moves and replica.cache.staged:
            _, blocks = self._grant(replica, message, moves)
            stage = self._begin(request_id, to_the_end(replica.cache.stage_out, blocks))
            await asyncio.wait([stage])
            if not stage.cancelled():
                stage.result()
        # Again, since others had their turn.
        tokens, blocks = self._grant(replica, message, moves)
        reply = pb.ExportKvReply(
            tokens=tokens,
            block_ids=blocks,
            map_path=map_path,
            blocks_total=replica.geometry.blocks,
        )
        if message.transport is pb.Transport.UCX:
            reply.ucx_address = self._ucx.address
            self._begin(request_id, self._send(replica, message, blocks, deadline))
        if message.checksums and moves:
            reply.layer_checksums = await asyncio.to_thread(
                layer_checksums,
                replica.geometry,
                replica.kv.buffer,
                blocks,
                _layers(replica, message),
            )
        return reply

    def _grant(
        self, replica: "Replica", message: pb.ExportKvRequest, moves: bool
    ) -> tuple[int, list[int]]:
        """(tokens, blocks) of the request, now leased to this target. A newer lease takes over
        from an older one: the daemon tried another target."""
        request_id = message.request_id
        if self._freeing_all or request_id in self._freeing:
            raise NotHeld(f"request_id: {request_id} is being freed")
        with replica.steps.exclusive() as stepper:
            held = stepper.held(request_id, _layers(replica, message))
        current = self._leases.get(request_id, 0)
        if message.lease_id < current or (message.lease_id != current and not moves):
            raise NotHeld(
                f"lease_id: {message.lease_id}; request {request_id} is leased to "
                f"{current or 'nobody'}"
            )
        self._leases[request_id] = message.lease_id
        return held

    async def _send(
        self, replica: "Replica", message: pb.ExportKvRequest, blocks: list[int], deadline: float
    ) -> None:
        segments = replica.geometry.segments(blocks, _layers(replica, message))
        try:
            await self._ucx.send(
                message.ucx_address, message.ucx_tag, replica.kv.buffer, segments, deadline
            )
        except (FabricError, ValueError) as error:
            # The target knows by itself; the KV stays for another try until it is released.
            log.warning("KV was not sent", request=message.request_id, error=str(error))

    def _begin(
        self, request_id: int, transfer: Coroutine[None, None, None]
    ) -> "asyncio.Task[None]":
        task = self._sends[request_id] = asyncio.create_task(transfer)

        def ended(_: "asyncio.Task[None]") -> None:
            if self._sends.get(request_id) is task:
                del self._sends[request_id]

        # Not in the coroutine: one that is cancelled at once never runs.
        task.add_done_callback(ended)
        return task

    async def _stop(self, request_id: int) -> None:
        task = self._sends.get(request_id)
        if task is not None:
            # It has begun by then; one that never begins leaves its receiver waiting.
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    @contextlib.asynccontextmanager
    async def freeing(self, request_ids: Collection[int] | None = None) -> AsyncIterator[None]:
        """While it is entered, the blocks of these requests (None: all) are read by no
        transfer of ours, and their leases are over: they can be freed."""
        ids = set(request_ids or ())
        self._freeing |= ids
        self._freeing_all += request_ids is None
        try:
            for request_id in ids if request_ids is not None else set(self._sends):
                await self._stop(request_id)
            yield
        finally:
            self._freeing -= ids
            self._freeing_all -= request_ids is None
            for request_id in ids if request_ids is not None else set(self._leases):
                self._leases.pop(request_id, None)
