"""The source's side of a weight transfer: sends the arena that lies here to whoever asks.

The arena may be on its way in itself. Then what arrives is forwarded at once, by the chunk
and unchecked: each receiver checks every section against `model.json`, so a damaged one is
noticed by all of them and costs the chain no time. A neighbour that gathers shards maps the
arena and is told, whenever it asks, how much of a shard is there.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from blitzd.engine.errors import InvalidField, NotReady, Overloaded
from blitzd.fabric import CHUNK_BYTES, FabricError, Identity, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb

SENDS = 16
"""At a time. A chain needs one; the rest is for those whose source has died."""
SEND_S = 3600.0
"""The receiver keeps the deadline that counts, and is watched."""
GATHER_BYTES = 8 << 20
"""That a neighbour is called for, unless fewer are left or come."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Weights that lie here, or are arriving."""

    digest: str
    buffer: object
    size: int
    reach: Callable[[int], int]
    """How far the bytes from an offset on are there. Asked on the fabric's thread."""
    until: Callable[[int, int], Awaitable[None]] | None = None
    """Waits until all between two offsets are there. None: they are."""
    map_path: str = ""
    """Where the arena's descriptor is handed out; empty: nowhere."""


class WeightServer:
    def __init__(self, identity: Identity, ucx: UcxFabric) -> None:
        self._identity = identity
        self._ucx = ucx
        self._offer: Offer | None = None
        self._offered = asyncio.Condition()
        self._sends: set[asyncio.Task[None]] = set()

    async def offer(self, offer: Offer) -> None:
        """Serves `offer` from now on; sends of an earlier one go on."""
        async with self._offered:
            self._offer = offer
            self._offered.notify_all()

    async def withdraw(self) -> None:
        """Serves nothing from now on. Returns when no send reads the bytes any more."""
        self._offer = None
        sends = list(self._sends)
        for send in sends:
            send.cancel()
        if sends:
            await asyncio.wait(sends)

    async def run(self, message: pb.ServeWeightsRequest, deadline: float) -> pb.ServeWeightsReply:
        """When it answers, the bytes are on their way, or will be as they arrive here; with
        TRANSPORT_MAP some lie where the reply says.

        Raises NotReady (another epoch, another model, none within `wait_ms`), InvalidField,
        Overloaded.
        """
        if message.source_epoch != self._identity.epoch:
            raise NotReady(f"source_epoch: {message.source_epoch}; this is {self._identity}")
        until = time.monotonic() + message.wait_ms / 1e3
        if message.transport is not pb.Transport.MAP:
            await self._ucx.start()
        offer = await self._await_offer(
            message.model_digest, min(until, deadline) - time.monotonic()
        )
        end = message.offset + message.length if message.length else offer.size
        if not message.offset <= end <= offer.size:
            raise InvalidField(
                f"offset, length: {message.offset}, {message.length}; the weights have"
                f" {offer.size} bytes"
            )
        if message.chunk_bytes > CHUNK_BYTES:
            raise InvalidField(f"chunk_bytes: {message.chunk_bytes}; accepted: up to {CHUNK_BYTES}")
        if message.transport is pb.Transport.MAP:
            return await self._point_to(offer, message.offset, end, min(until, deadline))
        if len(self._sends) >= SENDS:
            raise Overloaded(f"{self._identity} sends its weights to {SENDS} already")
        send = asyncio.create_task(self._send(offer, message, end))
        self._sends.add(send)
        send.add_done_callback(self._sends.discard)
        return pb.ServeWeightsReply(ucx_address=self._ucx.address)

    async def _point_to(
        self, offer: Offer, offset: int, end: int, until: float
    ) -> pb.ServeWeightsReply:
        if not offer.map_path:
            raise NotReady(f"transport: MAP; the weights of {self._identity} cannot be mapped")
        if offer.until is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until - time.monotonic()):
                    await offer.until(offset, min(end, offset + GATHER_BYTES))
        arrived = min(end, offer.reach(offset)) - offset
        if not arrived and offset < end:
            raise NotReady(f"offset: {offset}; nothing after it has come to {self._identity}")
        return pb.ServeWeightsReply(map_path=offer.map_path, arrived=arrived)

    async def _await_offer(self, digest: str, within_s: float) -> Offer:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._offered:
                await self._offered.wait_for(lambda: self._offer is not None)
        offer = self._offer
        if offer is None:
            raise NotReady(f"model_digest: {digest}; {self._identity} has no weights")
        if offer.digest != digest:
            raise NotReady(f"model_digest: {digest}; {self._identity} has {offer.digest}")
        return offer

    async def _send(self, offer: Offer, message: pb.ServeWeightsRequest, end: int) -> None:
        offset = message.offset
        deadline = time.monotonic() + SEND_S
        try:
            sent = await self._ucx.send(
                message.ucx_address,
                message.ucx_tag,
                offer.buffer,
                [(offset, end - offset)],
                deadline,
                available=lambda: offer.reach(offset) - offset,
                chunk_bytes=message.chunk_bytes or CHUNK_BYTES,
            )
            log.info("weights sent", offset=offset, bytes=sent)
        except (FabricError, ValueError) as error:
            # The receiver knows by itself.
            log.warning("weights were not sent", offset=offset, error=str(error))
