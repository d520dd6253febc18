"""Folders of other nodes and their agents."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.agent import Agent
from blitzd.fsm.folding import IllegalEvent, folds
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
    if agent is None or (agent.phase, agent.epoch) != ("present", event.epoch):
        raise IllegalEvent(f"node {event.node} with epoch {event.epoch} is not present")
    left = [replica.id for replica in state.replicas.values() if replica.node == event.node]
    if left:
        raise IllegalEvent(f"node {event.node} still has {', '.join(left)}")
    agent.phase, agent.trouble = "lost", event.reason
    state.touch("agent", agent.node)
