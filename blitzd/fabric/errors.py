"""What a transfer can end with, besides success."""


class FabricError(Exception):
    """Base of every error that the fabric raises."""


class PeerLost(FabricError):
    """The other process died, stalled, or gave the transfer up. Nothing more will come."""


class TransferTimeout(FabricError):
    """The deadline passed first. Bytes of the target may have been written."""


class IdentityMismatch(FabricError):
    """Another replica, or another epoch of it, answered: nothing was moved."""


class SegmentError(FabricError, ValueError):
    """A segment list that does not fit its buffer or its counterpart: nothing was moved."""
