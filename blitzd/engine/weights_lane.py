"""One range of an arena on its way in: from the first of its peers, or the next.

Over UCX the peer sends it; of a neighbour on this node it is copied out of its memory as it
arrives there, which is the all-gather of a sharded load.
"""

import asyncio
import time
from collections import deque

import structlog
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.sources import Sources
from blitzd.engine.weights_filling import Filling
from blitzd.engine.weights_peers import Peer, Plan, Share
from blitzd.fabric import FabricError, Identity, MappedPeers, PeerLost, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb

ASK_S = 5.0
BEGIN_MS = 3000
"""For a peer to begin to load itself, when it is asked for the first time."""
STALL_MS = 1500
"""For a neighbour to bring another byte of its shard: its own source may have died, and that
takes it half a second to notice."""
ROUNDS = 2
"""Of all peers, in a row and without a byte, before a load fails."""
RETRY_S = 0.05
"""Between two tries; twice as long after each that brought nothing."""

FAILURES = (FabricError, GRPCError, StreamTerminatedError, OSError)

log = structlog.get_logger()


class Means:
    """What the lanes of a load have in common."""

    def __init__(
        self,
        filling: Filling,
        plan: Plan,
        ucx: UcxFabric,
        sources: Sources,
        deadline: float,
    ) -> None:
        """`deadline` is a time of `time.monotonic()`."""
        self.chunk_bytes = plan.chunk_bytes
        self.sources_of_all = plan.peers
        """And not of a shard alone: what the load's source is one of."""
        self.filling = filling
        self.ucx = ucx
        self.sources = sources
        self.deadline = deadline
        self.neighbours = MappedPeers()
        self.asked: set[Identity] = set()
        self.taken: dict[str, int] = {}
        """Bytes that each peer has brought."""

    def took(self, peer: Peer, count: int) -> None:
        if count:
            name = str(peer.identity)
            self.taken[name] = self.taken.get(name, 0) + count

    def first_time(self, peer: Peer) -> bool:
        known = peer.identity in self.asked
        self.asked.add(peer.identity)
        return not known

    def close(self) -> None:
        self.neighbours.close()


class Lane:
    """Goes on where it was when it is run again."""

    def __init__(self, share: Share, means: Means) -> None:
        self.range = share.range
        self._peers = deque(share.peers)
        self._means = means
        self._why: dict[Identity, str] = {}
        self._fruitless = 0

    @property
    def has_peers(self) -> bool:
        return bool(self._peers)

    def drop(self, name: str) -> None:
        """Asks a peer no more."""
        self._peers = deque(peer for peer in self._peers if str(peer.identity) != name)

    async def run(self) -> None:
        """Returns when all of the range is there.

        Raises PeerLost when no peer can bring the rest, TimeoutError. What had arrived stays.
        """
        coverage = self._means.filling.coverage
        while gaps := coverage.missing(*self.range):
            start, end = gaps[0]
            if time.monotonic() >= self._means.deadline:
                raise TimeoutError(f"weights: the deadline passed at byte {start}")
            if self._fruitless >= ROUNDS * len(self._peers):
                raise PeerLost("; ".join(f"{peer}: {why}" for peer, why in self._why.items()))
            peer = self._peers[0]
            try:
                await self._take(peer, start, end)
            except FAILURES as error:
                got_on = coverage.reach(start) > start
                await self._turn_away(peer, error, got_on)

    async def _turn_away(self, peer: Peer, error: BaseException, got_on: bool) -> None:
        self._why[peer.identity] = describe(error)
        self._fruitless = 0 if got_on else self._fruitless + 1
        self._peers.rotate(-1)
        log.warning(
            "weights stopped coming",
            peer=str(peer.identity),
            at=self._means.filling.coverage.total(),
            error=self._why[peer.identity],
        )
        await asyncio.sleep(RETRY_S * ((1 << min(self._fruitless, 5)) - 1))

    async def _take(self, peer: Peer, start: int, end: int) -> None:
        filling = self._means.filling
        try:
            if peer in self._means.sources_of_all:
                filling.source = peer.identity.replica
            if peer.mapped:
                await self._gather(peer, start, end)
            else:
                await self._receive(peer, start, end)
        finally:
            self._means.took(peer, min(filling.coverage.reach(start), end) - start)

    async def _receive(self, peer: Peer, start: int, end: int) -> None:
        filling, ucx = self._means.filling, self._means.ucx
        await ucx.start()
        call = self._call(peer, start, end, BEGIN_MS if self._means.first_time(peer) else 0)
        call.ucx_address, call.ucx_tag = ucx.address, ucx.new_tag()
        call.chunk_bytes = self._means.chunk_bytes
        there = await self._ask(peer, call)
        owner = str(peer.identity)
        await ucx.receive(
            there.ucx_address,
            call.ucx_tag,
            filling.buffer,
            [(start, end - start)],
            self._means.deadline,
            on_bytes=lambda count: filling.advance(start, start + count, owner),
            chunk_bytes=call.chunk_bytes,
        )

    async def _gather(self, peer: Peer, start: int, end: int) -> None:
        filling, owner = self._means.filling, str(peer.identity)
        while start < end:
            wait_ms = BEGIN_MS if self._means.first_time(peer) else STALL_MS
            call = self._call(peer, start, end, wait_ms)
            call.transport = pb.Transport.MAP
            there = await self._ask(peer, call)
            deadline = self._means.deadline
            mapped = await self._means.neighbours.get(there.map_path, owner, deadline)
            piece = (start, min(there.arrived, end - start))
            await mapped.copy([piece], filling.buffer, [piece], deadline)
            filling.advance(start, start + piece[1], owner)
            start += piece[1]

    def _call(self, peer: Peer, start: int, end: int, wait_ms: int) -> pb.ServeWeightsRequest:
        return pb.ServeWeightsRequest(
            source_epoch=peer.identity.epoch,
            model_digest=self._means.filling.digest,
            offset=start,
            length=end - start,
            wait_ms=wait_ms,
        )

    async def _ask(self, peer: Peer, call: pb.ServeWeightsRequest) -> pb.ServeWeightsReply:
        stub = self._means.sources.stub(peer.identity, peer.endpoint)
        return await stub.serve_weights(call, timeout=ASK_S)


def describe(error: BaseException) -> str:
    if isinstance(error, GRPCError):
        return error.message or error.status.name.lower()
    return str(error) or type(error).__name__
