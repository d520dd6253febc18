"""Brings a model's weights in, from wherever the daemon says, and offers them to peers."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from blitzd.engine.options import Weights
from blitzd.engine.prepared import Prepared, open_prepared, open_tokenizer
from blitzd.engine.sources import Sources
from blitzd.engine.standby import Standby
from blitzd.engine.tokenizer import Tokenizer
from blitzd.engine.weights import drop_cached
from blitzd.engine.weights_filling import Filling
from blitzd.engine.weights_pull import WeightPull, peers_of
from blitzd.engine.weights_serve import Offer, WeightServer
from blitzd.fabric import Identity, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb

KEEP_S = 60.0
"""What arrived before a load failed waits so long for the load that goes on with it."""

log = structlog.get_logger()


class WeightLoader:
    """One load at a time."""

    def __init__(
        self,
        identity: Identity,
        ucx: UcxFabric,
        sources: Sources,
        how: Weights,
        standby: Standby,
    ) -> None:
        """`how` weights of the directory's own file are held; received ones are a copy."""
        self._standby = standby
        self._ucx = ucx
        self._how = how
        self._sources = sources
        self.server = WeightServer(identity, ucx)
        self._kept: Filling | None = None
        self._dropping: asyncio.TimerHandle | None = None

    async def run(
        self,
        message: pb.LoadModelRequest,
        deadline: float,
        tell: Callable[[pb.LoadProgress], None],
        arriving: Callable[[Prepared], Awaitable[None]] | None = None,
    ) -> Prepared:
        """The model, whole and checked, and on offer to peers until `give_up`.

        `arriving` gets the model, whose weights are then as far as the watermark says, while
        it comes from peers; the load ends when it has. `tell` may be called from another
        thread. Raises InvalidField, Corrupt, MemoryError, PeerLost, TimeoutError; then nothing
        is on offer.
        """
        directory = Path(message.model_path)
        try:
            if message.peers:
                peers = peers_of(message)
                filling, floor_s = self._resumed(directory), message.floor_ms / 1e3
                pull = WeightPull(filling, peers, self._ucx, self._sources, deadline, floor_s)
                prepared = await self._fill(filling, pull, tell, arriving)
            else:
                self._forget()
                prepared = await asyncio.to_thread(self._take, message.file, directory, tell)
            size = len(prepared.weights)
            whole = Offer(prepared.config.digest, prepared.weights, size, lambda: size)
            await self.server.offer(whole)
            return prepared
        except BaseException:
            await self.server.withdraw()
            raise

    def _take(
        self, file: pb.FileAccess, directory: Path, tell: Callable[[pb.LoadProgress], None]
    ) -> Prepared:
        if file is pb.FileAccess.UNSPECIFIED:
            if self._how == "map":
                return self._standby.take(directory, tell)
            return open_prepared(directory, tell, self._how)
        if file is pb.FileAccess.DISK:
            drop_cached(directory)
        source = file.name.lower()
        return open_prepared(
            directory, lambda moved: tell(dataclasses.replace(moved, source=source)), "copy"
        )

    async def _fill(
        self,
        filling: Filling,
        pull: WeightPull,
        tell: Callable[[pb.LoadProgress], None],
        arriving: Callable[[Prepared], Awaitable[None]] | None,
    ) -> Prepared:
        began, resumed_at = time.monotonic(), filling.arrived
        offer = Offer(filling.digest, filling.buffer, filling.size, lambda: filling.arrived)
        await self.server.offer(offer)
        # Beside the transfer, which mostly waits for the network.
        opening = asyncio.create_task(asyncio.to_thread(open_tokenizer, filling.directory))
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        early = asyncio.create_task(_hand_on(filling, opening, arriving))
        try:
            await pull.run(tell)
            await early
        except Exception:
            self._keep(filling)
            raise
        finally:
            early.cancel()
            await asyncio.wait([early])
        log.info(
            "weights received",
            bytes=filling.size,
            resumed_at=resumed_at,
            taken=pull.taken,
            ms=round((time.monotonic() - began) * 1e3),
        )
        return filling.prepared(await opening)

    async def give_up(self) -> None:
        """Offers nothing any more. Returns when nobody reads the weights."""
        self._forget()
        await self.server.withdraw()

    async def close(self) -> None:
        await self.give_up()
        self._sources.close()

    # What a failed load leaves.

    def _resumed(self, directory: Path) -> Filling:
        kept = self._kept
        self._forget()
        fresh = Filling(directory)
        return kept if kept is not None and kept.file == fresh.file else fresh

    def _keep(self, filling: Filling) -> None:
        self._kept = filling
        self._dropping = asyncio.get_running_loop().call_later(KEEP_S, self._forget)

    def _forget(self) -> None:
        if self._dropping is not None:
            self._dropping.cancel()
        self._kept = self._dropping = None


async def _hand_on(
    filling: Filling,
    opening: "asyncio.Task[Tokenizer]",
    arriving: Callable[[Prepared], Awaitable[None]] | None,
) -> None:
    if arriving is not None:
        await arriving(filling.prepared(await asyncio.shield(opening)))
