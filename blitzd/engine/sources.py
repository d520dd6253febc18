"""Channels to the workers that KV and weights are pulled from, one a life of each."""

import time
from collections import OrderedDict

from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.errors import InvalidField
from blitzd.engine.handover import SAID_BY_SOURCE
from blitzd.fabric import Identity, PeerLost, Tls, channel_to
from blitzd.proto.blitzd.engine import v1 as pb

CHANNELS = 64
"""To other workers, the least recently used ends first. More than a replica has sources."""


Key = tuple[Identity, str]


class Sources:
    """An address proves nothing: another epoch, or another replica, may listen there by
    now. So a channel belongs to an identity, and each call names the epoch that it means."""

    def __init__(self, tls: Tls) -> None:
        """`tls` is for those on other nodes."""
        self._tls = tls
        self._channels: OrderedDict[Key, Channel] = OrderedDict()

    async def export(
        self, source: Identity, endpoint: str, call: pb.ExportKvRequest, deadline: float
    ) -> pb.ExportKvReply:
        """Raises NotHeld, OtherEpoch, Mismatch (the source says no); PeerLost (it says
        nothing, or cannot); TimeoutError."""
        key = (source, endpoint)
        stub = self.stub(source, endpoint)
        try:
            reply = await stub.export_kv(call, timeout=max(0.0, deadline - time.monotonic()))
        except GRPCError as error:
            raise PeerLost(f"{source} failed: {error.message}") from error
        except TimeoutError:  # an OSError, but not of the source's making
            raise
        except (OSError, StreamTerminatedError) as error:
            self._drop(key)
            raise PeerLost(f"{source} is gone: {str(error) or type(error).__name__}") from error
        if reply.fault in SAID_BY_SOURCE:
            raise SAID_BY_SOURCE[reply.fault](f"{source}: {reply.reason}")
        return reply

    def stub(self, source: Identity, endpoint: str) -> pb.EngineStub:
        key = (source, endpoint)
        channel = self._channels.pop(key, None)
        if channel is None:
            for older in [k for k in self._channels if k[0].replica == key[0].replica]:
                self._drop(older)
            channel = channel_to(endpoint, self._tls)
        self._channels[key] = channel
        if len(self._channels) > CHANNELS:
            self._channels.popitem(last=False)[1].close()
        return pb.EngineStub(channel)

    def _drop(self, key: Key) -> None:
        # Another import from the same source may have dropped it first.
        channel = self._channels.pop(key, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        for key in list(self._channels):
            self._drop(key)


def peer_of(prefix: str, replica: str, epoch: int, endpoint: str) -> Identity:
    """Raises InvalidField, naming the fields that `prefix` begins."""
    try:
        peer = Identity.parse(f"{replica}/{epoch}")
    except ValueError as error:
        raise InvalidField(f"{prefix}replica, {prefix}epoch: {error}") from None
    if not endpoint:
        raise InvalidField(f"{prefix}endpoint: empty; the path of the worker's socket is needed")
    return peer
