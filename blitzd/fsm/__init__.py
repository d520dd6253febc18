"""State: the replica and request machines and the fold that events drive.

Promises: every transition is a row of one table; an event the table does not allow is
refused and changes nothing; the same events give the same state and the same hash.
"""

from blitzd.fsm.agent import Agent
from blitzd.fsm.entities import Loss, Node, Pair, Replica, Request
from blitzd.fsm.fold import fold
from blitzd.fsm.folding import IllegalEvent
from blitzd.fsm.link import Lease, Link
from blitzd.fsm.request import ENDS, RequestState
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import IllegalTransition, ReplicaState

__all__ = [
    "ENDS",
    "Agent",
    "ClusterState",
    "IllegalEvent",
    "IllegalTransition",
    "Lease",
    "Link",
    "Loss",
    "Node",
    "Pair",
    "Replica",
    "ReplicaState",
    "Request",
    "RequestState",
    "fold",
]
