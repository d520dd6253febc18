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
    """The node's agent left, was silent for its lease, or did not come back within one: its
    replicas are gone by now."""

    node: str
    epoch: int
    reason: str


@record_type(312, Kind.EVENT, Durability.ACK)
class NodeAwaited(Payload, frozen=True, array_like=True):
    """The controller was restarted, and the node's agent is expected back within its lease."""

    node: str
    epoch: int


@record_type(313, Kind.EVENT)
class WorkerAwaited(Payload, frozen=True, array_like=True):
    """The worker of an awaited node. Whether it lives its agent will say: until then the
    replica is Failed, and no other worker is started in its place."""

    replica: str
    epoch: int
    reason: str


@record_type(314, Kind.EVENT)
class WorkerAdopted(Payload, frozen=True, array_like=True):
    """An awaited worker answers and has all the weights: the replica is a warm null."""

    replica: str
    epoch: int
    pid: int
    was: str
    """The role it last served in."""
    digest: str
    layers_total: int
    bytes_total: int
    block_tokens: int
    blocks_total: int
