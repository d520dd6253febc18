"""Brings a model's weights in, from wherever the daemon says, and offers them to peers."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from blitzd.engine.errors import NotReady
from blitzd.engine.options import Weights
from blitzd.engine.prepared import Prepared, open_prepared, open_tokenizer
from blitzd.engine.sources import Sources
from blitzd.engine.standby import Standby
from blitzd.engine.tokenizer import Tokenizer
from blitzd.engine.weights import drop_cached
from blitzd.engine.weights_filling import Filling
from blitzd.engine.weights_peers import plan_of
from blitzd.engine.weights_pull import WeightPull
from blitzd.engine.weights_serve import Offer, WeightServer
from blitzd.fabric import ArenaServer, Identity, UcxFabric
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
        socket: Path,
    ) -> None:
        """`how` weights of the directory's own file are held; received ones are a copy, which
        those of a sharded load find at `socket`."""
        self._identity = identity
        self._socket = socket
        self._arena_server: ArenaServer | None = None
        self._given_up = 0
        """So often."""
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
            if message.peers or message.shards:
                plan = plan_of(message)
                filling = self._resumed(directory, shared=bool(plan.shards))
                pull = WeightPull(
                    filling,
                    plan,
                    self._identity,
                    self._ucx,
                    self._sources,
                    deadline,
                    message.floor_ms / 1e3,
                )
                prepared = await self._fill(filling, pull, tell, arriving)
            else:
                self._forget()
                prepared = await asyncio.to_thread(self._take, message.file, directory, tell)
            size, path = len(prepared.weights), self._map_path
            whole = Offer(
                prepared.config.digest, prepared.weights, size, lambda _: size, map_path=path
            )
            await self.server.offer(whole)
            return prepared
        except BaseException:
            await self.server.withdraw()
            await self._hide()
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
        began, resumed_at = time.monotonic(), filling.coverage.total()
        await self._show(filling)
        await self.server.offer(
            Offer(
                filling.digest,
                filling.buffer,
                filling.size,
                filling.coverage.reach,
                filling.until,
                self._map_path,
            )
        )
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

    async def hold(self, directory: Path) -> Offer:
        """The directory's own file, mapped, read through and on offer to peers until the next
        load or `give_up`. The kernel may take pages back that nobody maps elsewhere; they are
        read from the disk then. Raises InvalidField, Corrupt, NotReady (given up meanwhile)."""
        self._forget()
        before = self._given_up
        prepared = await asyncio.to_thread(self._standby.take, directory, lambda moved: None)
        if self._given_up != before:
            raise NotReady("it was told to let go of the weights while it read them")
        size = len(prepared.weights)
        offer = Offer(prepared.config.digest, prepared.weights, size, lambda _: size)
        await self.server.offer(offer)
        return offer

    async def give_up(self) -> None:
        """Offers nothing any more. Returns when nobody reads the weights."""
        self._given_up += 1
        self._forget()
        await self.server.withdraw()
        await self._hide()

    async def close(self) -> None:
        await self.give_up()
        self._sources.close()

    # The arena, for the neighbours that gather from it.

    @property
    def _map_path(self) -> str:
        return "" if self._arena_server is None else str(self._arena_server.path)

    async def _show(self, filling: Filling) -> None:
        await self._hide()
        if filling.arena is not None:
            server = ArenaServer(self._socket, filling.arena, str(self._identity))
            await server.start()
            self._arena_server = server

    async def _hide(self) -> None:
        server, self._arena_server = self._arena_server, None
        if server is not None:
            await server.close()

    # What a failed load leaves.

    def _resumed(self, directory: Path, shared: bool) -> Filling:
        kept = self._kept
        self._forget()
        fresh = Filling(directory, shared)
        if kept is None or kept.file != fresh.file or (shared and kept.arena is None):
            return fresh
        return kept

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
