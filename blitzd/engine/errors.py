"""What goes wrong in a worker, and the gRPC status that its RPCs end with: faults of a
hand-over have a message of their own (`handover`). No torch here."""

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from blitzd.fabric import PeerLost
from blitzd.sched import NoRoom, Refused


class InvalidField(ValueError):
    """A field of a message cannot be used. The text names it, its value and what can be."""


class NotHeld(LookupError):
    """No request of that id holds its KV here, or not under that lease."""


class OtherEpoch(Exception):
    """Another life of this replica was meant."""


class NotReady(Exception):
    """No model is loaded, or another one than was asked for."""


class Mismatch(Exception):
    """The two sides of a hand-over do not fit each other."""


class Corrupt(Exception):
    """Bytes that do not have the digest they should have."""


class CorruptKv(Corrupt):
    """A layer of moved KV, the first one, that does not have the source's checksum."""

    def __init__(self, message: str, layer: int, source: int, target: int) -> None:
        super().__init__(message)
        self.layer = layer
        self.source = source
        self.target = target


class Stalled(Exception):
    """No byte of a transfer came for too long."""


class Overloaded(Exception):
    """Too many commands wait for the step that is running."""


STATUS: tuple[tuple[type[BaseException], Status], ...] = (
    (InvalidField, Status.INVALID_ARGUMENT),
    (Refused, Status.INVALID_ARGUMENT),
    (NotReady, Status.FAILED_PRECONDITION),
    (Corrupt, Status.DATA_LOSS),
    (PeerLost, Status.UNAVAILABLE),
    (NoRoom, Status.RESOURCE_EXHAUSTED),
    (Overloaded, Status.RESOURCE_EXHAUSTED),
    (MemoryError, Status.RESOURCE_EXHAUSTED),
    (TimeoutError, Status.DEADLINE_EXCEEDED),
)


def as_status(error: BaseException) -> GRPCError:
    """The status for an error. One that is not listed is a defect of ours: INTERNAL."""
    if isinstance(error, GRPCError):
        return error
    for kind, status in STATUS:
        if isinstance(error, kind):
            return GRPCError(status, str(error) or kind.__name__)
    return GRPCError(Status.INTERNAL, f"{type(error).__name__}: {error}")
