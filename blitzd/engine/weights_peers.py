"""Whom a load takes which bytes from, as it was told. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from blitzd.engine.coverage import Range, shards
from blitzd.engine.errors import InvalidField
from blitzd.engine.layout import ALIGNMENT
from blitzd.fabric import CHUNK_BYTES, Identity
from blitzd.proto.blitzd.engine import v1 as pb


@dataclass(frozen=True, slots=True)
class Peer:
    identity: Identity
    endpoint: str
    """Its gRPC socket."""
    mapped: bool = False
    """It is a neighbour whose arena is copied out of its memory."""


@dataclass(frozen=True, slots=True)
class Share:
    """A range of the arena, and who gives it: the first, or the next when it fails."""

    range: Range
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a LoadModel says about peers."""

    peers: tuple[Peer, ...]
    """Each has all of the weights, or will; nearest first."""
    shards: tuple[Peer, ...]
    """The workers of this domain that bring a range each; none: the load is not sharded."""
    chunk_bytes: int
    """Of a message over UCX."""

    def shares(self, size: int, here: Identity) -> list[Share]:
        """All of [0, size)."""
        if not self.shards:
            return [Share((0, size), self.peers)]
        cut = shards(size, len(self.shards), ALIGNMENT)
        others = tuple(peer for peer in self.shards if peer.identity != here)
        return [
            # The others get its range from it, unless all its own peers fail and theirs do not.
            Share(range_, (*self.peers, *others) if peer.identity == here else (peer, *self.peers))
            for range_, peer in zip(cut, self.shards, strict=True)
        ]


def plan_of(message: pb.LoadModelRequest) -> Plan:
    """Raises InvalidField."""
    if message.shards and not message.peers:
        raise InvalidField("peers: none; a sharded load needs those that have all of the weights")
    chunk = message.chunk_bytes or CHUNK_BYTES
    if chunk > CHUNK_BYTES:
        raise InvalidField(f"chunk_bytes: {chunk}; accepted: up to {CHUNK_BYTES}")
    return Plan(_parsed("peers", message.peers), _parsed("shards", message.shards), chunk)


def _parsed(field: str, peers: Sequence[pb.WeightPeer]) -> tuple[Peer, ...]:
    found = []
    for index, peer in enumerate(peers):
        try:
            identity = Identity.parse(f"{peer.replica_id}/{peer.epoch}")
        except ValueError as error:
            raise InvalidField(f"{field}[{index}]: {error}") from None
        if not peer.endpoint:
            raise InvalidField(f"{field}[{index}].endpoint: empty; {identity}'s socket is needed")
        found.append(Peer(identity, peer.endpoint, peer.transport is pb.Transport.MAP))
    return tuple(found)
