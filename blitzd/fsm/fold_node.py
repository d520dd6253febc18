"""Folders of the node itself."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.folding import IllegalEvent, folds
from blitzd.fsm.state import ClusterState


@folds(ev.NodeStarted)
def _(state: ClusterState, event: ev.NodeStarted, record: Record) -> None:
    node = state.node
    node.name, node.version, node.boot_epoch = event.node, event.version, event.boot_epoch
    node.phase, node.drain_deadline_ns = "running", 0
    node.host_copies = {}
    node.policy, node.core_version = dict(event.policy), event.core_version
    # The core's clock starts again with each boot, so times of the last one mean nothing.
    for replica in state.replicas.values():
        replica.retry_ns = replica.failures = 0
        replica.prompt_ns = replica.import_ns = 0
        replica.trouble = ""
        # A worker that has it at hand still does no harm, and has it faster when it is asked.
        replica.pooled = ""
        if replica.restart_epoch:
            replica.restart_ns = record.mono_ns
        state.touch("replica", replica.id)
    if state.entity("plan", 0) is not None:
        state.plan.restart(record.mono_ns)
        state.touch("plan", 0)
    state.touch("node", 0)


@folds(ev.NodeDraining)
def _(state: ClusterState, event: ev.NodeDraining, record: Record) -> None:
    state.node.phase = "draining"
    state.node.drain_deadline_ns = event.deadline_ns
    state.touch("node", 0)


@folds(ev.NodeStopped)
def _(state: ClusterState, event: ev.NodeStopped, record: Record) -> None:
    state.node.phase = "stopped"
    state.touch("node", 0)


@folds(ev.HostCopyKept)
def _(state: ClusterState, event: ev.HostCopyKept, record: Record) -> None:
    state.node.host_copies = state.node.host_copies | {event.node: record.mono_ns}
    state.touch("node", 0)


@folds(ev.HostCopyDropped)
def _(state: ClusterState, event: ev.HostCopyDropped, record: Record) -> None:
    if event.node not in state.node.host_copies:
        raise IllegalEvent(f"node {event.node} has no copy")
    state.node.host_copies = {
        node: kept_ns for node, kept_ns in state.node.host_copies.items() if node != event.node
    }
    state.touch("node", 0)
