"""Every input and event of the daemon, by type id.

Ids are never reused: 1-99 inputs, 100-999 events. Times are nanoseconds of the core's
clock, sizes bytes, KV counts blocks. Events are what the core decided, and all that the
state is folded from; those about the node and the log itself are here.
"""

from blitzd.events.agent_events import *
from blitzd.events.handover_events import *
from blitzd.events.inputs import *
from blitzd.events.live_events import *
from blitzd.events.plan_events import *
from blitzd.events.pool_events import *
from blitzd.events.record import Durability, Kind, Payload, record_type
from blitzd.events.replica_events import *
from blitzd.events.request_events import *
from blitzd.events.topology_events import *


@record_type(100, Kind.EVENT, Durability.ACK)
class NodeStarted(Payload, frozen=True, array_like=True):
    """A boot begins, with the policy that holds for it."""

    boot_epoch: int
    version: str
    node: str
    policy: tuple[tuple[str, int], ...]
    core_version: int


@record_type(101, Kind.EVENT, Durability.ACK)
class NodeDraining(Payload, frozen=True, array_like=True):
    """No new request is accepted; those accepted run until the deadline."""

    reason: str
    deadline_ns: int


@record_type(102, Kind.EVENT, Durability.ACK)
class NodeStopped(Payload, frozen=True, array_like=True):
    """Nothing is left to serve; every worker is ended."""

    reason: str


@record_type(300, Kind.EVENT, Durability.LAZY)
class OccupancySampled(Payload, frozen=True, array_like=True):
    """What the worker last said of its KV and its running requests."""

    replica: str
    epoch: int
    blocks_used: int
    running: int


@record_type(301, Kind.EVENT, Durability.LAZY, must_understand=False)
class StaleNoticeIgnored(Payload, frozen=True, array_like=True):
    """A message of an old epoch, or about a lease or request that has ended."""

    notice: str
    replica: str
    epoch: int


@record_type(302, Kind.EVENT, Durability.LAZY, must_understand=False)
class StateHashed(Payload, frozen=True, array_like=True):
    """The hash of the state right before this event; replay stops where it differs."""

    state_hash: str
