"""The source's side of a weight transfer: sends the arena that lies here to whoever asks.

The arena may be on its way in itself. Then what arrives is forwarded at once, by the chunk
and unchecked: each receiver checks every section against `model.json`, so a damaged one is
noticed by all of them and costs the chain no time.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from blitzd.engine.errors import InvalidField, NotReady, Overloaded
from blitzd.fabric import FabricError, Identity, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb

SENDS = 16
"""At a time. A chain needs one; the rest is for those whose source has died."""
SEND_S = 3600.0
"""The receiver keeps the deadline that counts, and is watched."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Weights that lie here, or are arriving."""

    digest: str
    buffer: object
    size: int
    arrived: Callable[[], int]
    """How many of the first bytes are there. Asked on the fabric's thread."""


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
        """When it answers, the bytes are on their way, or will be as they arrive here.

        Raises NotReady (another epoch, another model, none within `wait_ms`), InvalidField,
        Overloaded.
        """
        if message.source_epoch != self._identity.epoch:
            raise NotReady(f"source_epoch: {message.source_epoch}; this is {self._identity}")
        await self._ucx.start()
        offer = await self._await_offer(
            message.model_digest, min(message.wait_ms / 1e3, deadline - time.monotonic())
        )
        if message.offset > offer.size:
            raise InvalidField(f"offset: {message.offset}; the weights have {offer.size} bytes")
        if len(self._sends) >= SENDS:
            raise Overloaded(f"{self._identity} sends its weights to {SENDS} already")
        send = asyncio.create_task(self._send(offer, message))
        self._sends.add(send)
        send.add_done_callback(self._sends.discard)
        return pb.ServeWeightsReply(ucx_address=self._ucx.address)

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

    async def _send(self, offer: Offer, message: pb.ServeWeightsRequest) -> None:
        offset = message.offset
        deadline = time.monotonic() + SEND_S
        try:
            sent = await self._ucx.send(
                message.ucx_address,
                message.ucx_tag,
                offer.buffer,
                [(offset, offer.size - offset)],
                deadline,
                available=lambda: offer.arrived() - offset,
            )
            log.info("weights sent", offset=offset, bytes=sent)
        except (FabricError, ValueError) as error:
            # The receiver knows by itself.
            log.warning("weights were not sent", offset=offset, error=str(error))
