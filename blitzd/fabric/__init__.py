"""Byte movers between workers: mapped arenas on one node, UCX between nodes.

Promises: bytes are exact or an error is raised; a dead or stalled peer ends its own
transfers, within a second, and nothing else; when a transfer has raised, its target is not
written any more.
"""

from blitzd.fabric.arena import SharedArena
from blitzd.fabric.arena_server import ArenaServer
from blitzd.fabric.codec import quicken
from blitzd.fabric.endpoints import PLAIN, Tls, channel_to, endpoint_of, host_and_port
from blitzd.fabric.errors import (
    FabricError,
    IdentityMismatch,
    PeerLost,
    SegmentError,
    TransferTimeout,
)
from blitzd.fabric.identity import Identity
from blitzd.fabric.mapped_peer import MappedPeer, MappedPeers
from blitzd.fabric.segments import Segment
from blitzd.fabric.ucx import UcxFabric
from blitzd.fabric.ucx_env import CHUNK_BYTES

__all__ = [
    "CHUNK_BYTES",
    "PLAIN",
    "ArenaServer",
    "FabricError",
    "Identity",
    "IdentityMismatch",
    "MappedPeer",
    "MappedPeers",
    "PeerLost",
    "Segment",
    "SegmentError",
    "SharedArena",
    "Tls",
    "TransferTimeout",
    "UcxFabric",
    "channel_to",
    "endpoint_of",
    "host_and_port",
]

quicken()
