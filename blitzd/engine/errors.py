"""What the worker's RPCs can fail with, and the gRPC status each becomes. No torch here."""

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from blitzd.fabric import FabricError, IdentityMismatch, PeerLost, TransferTimeout
from blitzd.sched import NoRoom, Refused


class InvalidField(ValueError):
    """A field of a message cannot be used. The text names it, its value and what can be."""


class NotHeld(LookupError):
    """No request of that id holds its KV here, or not under that lease."""


class NotReady(Exception):
    """No model is loaded, or another one than was asked for."""


class Mismatch(Exception):
    """The two sides of a hand-over do not fit each other."""


class Corrupt(Exception):
    """Bytes that do not have the digest they should have."""


class Overloaded(Exception):
    """Too many commands wait for the step that is running."""


STATUS: tuple[tuple[type[BaseException], Status], ...] = (
    (InvalidField, Status.INVALID_ARGUMENT),
    (Refused, Status.INVALID_ARGUMENT),
    (NotHeld, Status.NOT_FOUND),
    (NotReady, Status.FAILED_PRECONDITION),
    (Mismatch, Status.FAILED_PRECONDITION),
    (Corrupt, Status.DATA_LOSS),
    (NoRoom, Status.RESOURCE_EXHAUSTED),
    (Overloaded, Status.RESOURCE_EXHAUSTED),
    (MemoryError, Status.RESOURCE_EXHAUSTED),
    (PeerLost, Status.UNAVAILABLE),
    (IdentityMismatch, Status.UNAVAILABLE),
    (TransferTimeout, Status.DEADLINE_EXCEEDED),
    (FabricError, Status.INTERNAL),
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
