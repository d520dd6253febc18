"""Events about the agents of other nodes (310-319)."""

from blitzd.events.record import Durability, Kind, Payload, record_type


@record_type(310, Kind.EVENT, Durability.ACK)
class NodeJoined(Payload, frozen=True, array_like=True):
    """The node's agent is in contact and starts workers as it is told."""

    node: str
    epoch: int
    address: str
    version: str
    arch: str
    cpus: int
    memory_mib: int


@record_type(311, Kind.EVENT, Durability.ACK)
class NodeLost(Payload, frozen=True, array_like=True):
    """The node's agent left, or was silent for its lease: its replicas are gone by now."""

    node: str
    epoch: int
    reason: str
