"""The host's copy of a model, as ServerlessLLM keeps it: from one load on for `host_ttl_ms`,
or for as long as a replica of the node has the weights (reference 5).

It is the kernel's page cache of the prepared file; what is folded is whether a load may count
on it. Kept only while `ladder_host` is on: the mapped pool needs nobody to remember it.
"""

from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica, ReplicaState
from blitzd.fsm.table import LOADING, WITHOUT_WEIGHTS


def keep(turn: Turn, replica: Replica) -> None:
    """After a load: the copy is as good as new."""
    if turn.policy.ladder_host and turn.policy.host_ttl_ms:
        turn.emit(ev.HostCopyKept(replica.node))


def expire(turn: Turn) -> None:
    for node in sorted(turn.state.node.host_copies):
        if not has_copy(turn, node):
            turn.emit(ev.HostCopyDropped(node))


def has_copy(turn: Turn, node: str) -> bool:
    ttl_ms = turn.policy.host_ttl_ms
    if not ttl_ms:
        return True
    kept_ns = turn.state.node.host_copies.get(node)
    if kept_ns is not None and turn.mono_ns < kept_ns + ttl_ms * MS:
        return True
    holding = [s for s in ReplicaState if s not in WITHOUT_WEIGHTS and s not in LOADING]
    return any(r.node == node for r in turn.state.in_states(*holding))
