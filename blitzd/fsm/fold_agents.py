"""Folders of other nodes, their agents, and workers that are found again with them."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.agent import Agent
from blitzd.fsm.folding import (
    IllegalEvent,
    folds,
    forget_links,
    forget_weights,
    move,
    replica_of,
    require_idle,
)
from blitzd.fsm.state import ClusterState


@folds(ev.NodeJoined)
def _(state: ClusterState, event: ev.NodeJoined, record: Record) -> None:
    agent = state.agents.get(event.node)
    if agent is None:
        agent = state.agents[event.node] = Agent(event.node)
    agent.epoch, agent.phase, agent.trouble = event.epoch, "present", ""
    agent.address, agent.version, agent.arch = event.address, event.version, event.arch
    agent.cpus, agent.memory_mib = event.cpus, event.memory_mib
    state.touch("agent", agent.node)


@folds(ev.NodeLost)
def _(state: ClusterState, event: ev.NodeLost, record: Record) -> None:
    agent = state.agents.get(event.node)
    if agent is None or agent.phase == "lost" or agent.epoch != event.epoch:
        raise IllegalEvent(f"node {event.node} with epoch {event.epoch} is not present")
    left = [replica.id for replica in state.replicas.values() if replica.node == event.node]
    if left:
        raise IllegalEvent(f"node {event.node} still has {', '.join(left)}")
    agent.phase, agent.trouble = "lost", event.reason
    state.touch("agent", agent.node)


@folds(ev.NodeAwaited)
def _(state: ClusterState, event: ev.NodeAwaited, record: Record) -> None:
    agent = state.agents.get(event.node)
    if agent is None or (agent.phase, agent.epoch) != ("present", event.epoch):
        raise IllegalEvent(f"node {event.node} with epoch {event.epoch} is not present")
    agent.phase = "awaited"
    state.touch("agent", agent.node)


@folds(ev.WorkerAwaited)
def _(state: ClusterState, event: ev.WorkerAwaited, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if replica.worker != "attached":
        raise IllegalEvent(f"replica {replica.id} has worker {replica.worker}, not attached")
    require_idle(state, replica)
    move(replica, "lose", record)
    replica.worker, replica.attached_ns, replica.trouble = "awaited", 0, event.reason
    replica.dirty_ns = replica.audits_failed = 0
    forget_weights(replica)
    forget_links(state, replica.id)
    state.touch("replica", replica.id)


@folds(ev.WorkerAdopted)
def _(state: ClusterState, event: ev.WorkerAdopted, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    if replica.worker != "awaited":
        raise IllegalEvent(f"replica {replica.id} has worker {replica.worker}, not awaited")
    move(replica, "adopt", record)
    replica.worker, replica.pid, replica.attached_ns = "attached", event.pid, record.mono_ns
    replica.null_role, replica.null_ns, replica.trouble = event.was, record.mono_ns, ""
    replica.digest, replica.source = event.digest, ""
    replica.layers_ready = replica.layers_total = event.layers_total
    replica.bytes_loaded = replica.bytes_total = event.bytes_total
    replica.block_tokens, replica.blocks_total = event.block_tokens, event.blocks_total
    state.touch("replica", replica.id)
