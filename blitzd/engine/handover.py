"""How a hand-over of KV can end: the faults that cross the wire, and the errors behind them."""

from blitzd.engine.errors import CorruptKv, Mismatch, NotHeld, OtherEpoch, Overloaded, Stalled
from blitzd.fabric import FabricError, IdentityMismatch, PeerLost, TransferTimeout
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import NoRoom, Refused

Fault = pb.HandoverFault

FAULTS: tuple[tuple[type[BaseException], Fault], ...] = (
    (NoRoom, Fault.NO_ROOM),
    (Overloaded, Fault.NO_ROOM),
    (MemoryError, Fault.NO_ROOM),
    (Refused, Fault.REFUSED),
    (OtherEpoch, Fault.EPOCH),
    (NotHeld, Fault.NOT_HELD),
    (Mismatch, Fault.MISMATCH),
    (CorruptKv, Fault.CORRUPT),
    (Stalled, Fault.STALLED),
    (IdentityMismatch, Fault.EPOCH),
    (PeerLost, Fault.SOURCE),
    (TransferTimeout, Fault.DEADLINE),
    (TimeoutError, Fault.DEADLINE),
    (FabricError, Fault.SOURCE),
)

SAID_BY_SOURCE: dict[Fault, type[Exception]] = {
    Fault.NOT_HELD: NotHeld,
    Fault.EPOCH: OtherEpoch,
    Fault.MISMATCH: Mismatch,
}
"""What the source refuses with, as the target raises it."""


def fault_of(error: BaseException) -> Fault:
    """TARGET for whatever is nobody else's fault."""
    for kind, fault in FAULTS:
        if isinstance(error, kind):
            return fault
    return Fault.TARGET
