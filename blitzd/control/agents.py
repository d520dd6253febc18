"""Decisions about other nodes: their replicas come and go with their agents.

A lost node's replicas leave the state, so that no plan counts on them. The node keeps a floor
for their epochs: (id, epoch) is used once, whoever still runs under it out there.
"""

from blitzd.control.replicas import lose_node
from blitzd.control.turn import Turn
from blitzd.events import types as ev


def agent_joined(turn: Turn, joined: ev.AgentJoined) -> None:
    """Also of one that was restarted within its lease: its replicas go on."""
    if turn.state.node.phase != "running":
        return
    turn.emit(
        ev.NodeJoined(
            joined.node,
            joined.epoch,
            joined.address,
            joined.version,
            joined.arch,
            joined.cpus,
            joined.memory_mib,
        )
    )
    for replica_id, role in joined.replicas:
        if replica_id not in turn.state.replicas:
            turn.emit(ev.ReplicaRegistered(replica_id, joined.node, role))


def agent_lost(turn: Turn, lost: ev.AgentLost) -> None:
    agent = turn.state.agents.get(lost.node)
    if agent is None or (agent.phase, agent.epoch) != ("present", lost.epoch):
        turn.ignore(lost.node, lost.epoch)
    else:
        lose_node(turn, agent, lost.reason)
