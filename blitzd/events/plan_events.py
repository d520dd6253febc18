"""Events of the autoscaling planner (150-159)."""

from blitzd.events.record import Durability, Kind, Payload, record_type

Numbers = tuple[tuple[str, int], ...]
"""(name, value) in order of names."""


@record_type(150, Kind.EVENT, Durability.ACK)
class PlanDecided(Payload, frozen=True, array_like=True):
    """The planner wants other counts from here on."""

    wanted_prefill: int
    wanted_decode: int
    prefill: str
    """Its verdict on the role, as in PlanHeld, or up, down or observed."""
    decode: str
    inputs: Numbers
    terms: Numbers
    clamps: tuple[str, ...]


@record_type(151, Kind.EVENT)
class PlanHeld(Payload, frozen=True, array_like=True):
    """The planner changes nothing, and why. Recorded when the reason changes, and when the
    most that was needed during a wait rises."""

    prefill: str
    """steady, down_wait, loading, draining, at_max, no_spare, asked, no_rate or pinned."""
    decode: str
    prefill_peak: int
    """The most replicas that the load would have allowed since the wait began; 0: no wait."""
    decode_peak: int
    inputs: Numbers
    terms: Numbers
    clamps: tuple[str, ...]


@record_type(152, Kind.EVENT, Durability.ACK)
class PlannerPinned(Payload, frozen=True, array_like=True):
    """An operator set the counts; the planner leaves them for `hold_ns`, or until it is told
    otherwise (0)."""

    hold_ns: int


@record_type(153, Kind.EVENT, Durability.ACK)
class PlannerReleased(Payload, frozen=True, array_like=True):
    """The planner decides again. `reason` is "operator" or "hold is over"."""

    reason: str


@record_type(154, Kind.EVENT)
class HostCopyKept(Payload, frozen=True, array_like=True):
    """A node's memory holds the model: a load there has just ended. Only while the policy
    asks for it (`ladder_host`, `host_ttl_ms`)."""

    node: str


@record_type(155, Kind.EVENT)
class HostCopyDropped(Payload, frozen=True, array_like=True):
    """No load may count on the node's copy: its time is over and no replica has the weights."""

    node: str
