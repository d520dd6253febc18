"""The bounds of the HTTP server, in one place."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 4 * 1024 * 1024
    """Of a request's body. More is a 413."""
    header_bytes: int = 8190
    """Of the request line and of each header field."""
    headers: int = 128
    body_s: float = 30.0
    """A request's body arrives within this time, or the answer is 408."""
    idle_s: float = 75.0
    """A connection without a complete request line and headers is closed after it."""
    send_s: float = 30.0
    """A client that takes nothing for this long is disconnected, its request cancelled."""
    stall_s: float = 3700.0
    """Longest wait for acceptance, for a first token and between two tokens. Longer than the
    deadline that the node gives every request: that one ends what takes too long."""
    keepalive_s: float = 15.0
    """A stream that has nothing to say for so long says that it is there: proxies and load
    balancers cut off what is silent for a minute."""
    release_s: float = 5.0
    """Longest wait for the node to acknowledge a cancellation."""
    shutdown_s: float = 10.0
    """Requests still running this long after the start of a shutdown are cut off."""


DEFAULT_LIMITS = Limits()
