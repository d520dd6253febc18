"""Events about the pool: the copy of the model that one node keeps for all (171-179)."""

from blitzd.events.record import Durability, Kind, Payload, record_type


@record_type(171, Kind.EVENT, Durability.ACK)
class PoolCopyAssigned(Payload, frozen=True, array_like=True):
    """A spare is to keep the model in its node's memory and give it to whoever loads, since no
    replica could."""

    replica: str
    epoch: int


@record_type(172, Kind.EVENT)
class PoolCopyHeld(Payload, frozen=True, array_like=True):
    """It is there, whole."""

    replica: str
    epoch: int
    bytes_total: int


@record_type(173, Kind.EVENT)
class PoolCopyFailed(Payload, frozen=True, array_like=True):
    """The spare could not; it is not asked again before `retry_ns`."""

    replica: str
    epoch: int
    reason: str
    retry_ns: int


@record_type(174, Kind.EVENT)
class PoolCopyReleased(Payload, frozen=True, array_like=True):
    """It is not needed: a replica gives the weights, or the policy wants no pool."""

    replica: str
    epoch: int
    reason: str
