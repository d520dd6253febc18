"""The target's side of a weight transfer: asks its peers, nearest first, until all is there.

What has arrived is never asked for again. When a peer dies, stalls or turns out to have
damaged bytes, the next one gives what is missing: so a chain heals around a dead node, which
its own successor alone has to notice.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.errors import InvalidField
from blitzd.engine.sources import Sources
from blitzd.engine.weights_filling import Damaged, Filling
from blitzd.fabric import FabricError, Identity, PeerLost, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb

ASK_S = 5.0
BEGIN_MS = 3000
"""For a peer to begin to load itself, when it is asked for the first time."""
ROUNDS = 2
"""Of all peers, in a row and without a byte, before a load fails."""
RETRY_S = 0.05
"""Between two tries; twice as long after each that brought nothing."""

FAILURES = (FabricError, GRPCError, StreamTerminatedError, OSError)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Peer:
    identity: Identity
    endpoint: str
    """Its gRPC socket."""


def peers_of(message: pb.LoadModelRequest) -> list[Peer]:
    """Raises InvalidField."""
    peers = []
    for index, peer in enumerate(message.peers):
        try:
            identity = Identity.parse(f"{peer.replica_id}/{peer.epoch}")
        except ValueError as error:
            raise InvalidField(f"peers[{index}]: {error}") from None
        if not peer.endpoint:
            raise InvalidField(f"peers[{index}].endpoint: empty; {identity}'s socket is needed")
        peers.append(Peer(identity, peer.endpoint))
    return peers


class WeightPull:
    """One load from peers."""

    def __init__(
        self,
        filling: Filling,
        peers: Sequence[Peer],
        ucx: UcxFabric,
        sources: Sources,
        deadline: float,
        floor_s: float = 0.0,
    ) -> None:
        """`deadline` is a time of `time.monotonic()`; all of it takes `floor_s` at least, and
        each layer its part of that."""
        self._filling = filling
        self._peers = deque(peers)
        self._ucx = ucx
        self._sources = sources
        self._deadline = deadline
        self._floor_s = floor_s
        self._began = time.monotonic()
        self._asked: set[Peer] = set()
        self.taken: dict[str, int] = {}
        """Bytes that each peer has brought."""

    async def run(self, tell: Callable[[pb.LoadProgress], None]) -> None:
        """Returns when the filling is complete, telling the watermark on the way.

        Raises PeerLost when no peer can bring the rest, Corrupt when none has it undamaged,
        TimeoutError. What had arrived stays.
        """
        why: dict[Identity, str] = {}
        fruitless = 0
        while not self._filling.complete:
            if time.monotonic() >= self._deadline:
                raise TimeoutError(f"weights: the deadline passed at byte {self._filling.arrived}")
            if fruitless >= ROUNDS * len(self._peers):
                raise PeerLost("; ".join(f"{peer}: {reason}" for peer, reason in why.items()))
            peer, before = self._peers[0], self._filling.arrived
            try:
                await self._take(peer, before, tell)
            except Damaged as error:
                self._filling.rewind(error.section)
                log.error("damaged weights", peer=str(peer.identity), error=str(error))
                if error.section.offset >= before:
                    # All of it came from this peer: it has nothing better to give.
                    self._peers.popleft()
                if not self._peers:
                    raise
            except FAILURES as error:
                why[peer.identity] = _describe(error)
                fruitless = 0 if self._filling.arrived > before else fruitless + 1
                self._peers.rotate(-1)
                log.warning(
                    "weights stopped coming",
                    peer=str(peer.identity),
                    at=self._filling.arrived,
                    error=why[peer.identity],
                )
                await asyncio.sleep(RETRY_S * ((1 << min(fruitless, 5)) - 1))

    async def _take(self, peer: Peer, offset: int, tell: Callable[[pb.LoadProgress], None]) -> None:
        self._filling.source = peer.identity.replica
        works = [asyncio.create_task(self._filling.check(tell, self._due))]
        if offset < self._filling.size:
            works.append(asyncio.create_task(self._receive(peer, offset)))
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for work in works:
                work.cancel()
            await asyncio.wait(works)
            moved = self._filling.arrived - offset
            self.taken[str(peer.identity)] = self.taken.get(str(peer.identity), 0) + moved
        for work in works:
            if not work.cancelled():
                work.result()

    def _due(self, share: float) -> float:
        return self._began + self._floor_s * share - time.monotonic()

    async def _receive(self, peer: Peer, offset: int) -> None:
        filling = self._filling
        await self._ucx.start()
        call = pb.ServeWeightsRequest(
            source_epoch=peer.identity.epoch,
            model_digest=filling.digest,
            offset=offset,
            ucx_address=self._ucx.address,
            ucx_tag=self._ucx.new_tag(),
            wait_ms=0 if peer in self._asked else BEGIN_MS,
        )
        self._asked.add(peer)
        there = await self._sources.stub(peer.identity, peer.endpoint).serve_weights(
            call, timeout=ASK_S
        )
        await self._ucx.receive(
            there.ucx_address,
            call.ucx_tag,
            filling.buffer,
            [(offset, filling.size - offset)],
            self._deadline,
            on_bytes=lambda count: filling.advance(offset + count),
        )


def _describe(error: BaseException) -> str:
    if isinstance(error, GRPCError):
        return error.message or error.status.name.lower()
    return str(error) or type(error).__name__
