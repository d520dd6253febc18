"""Decisions about other nodes: their replicas come and go with their agents.

A lost node's replicas leave the state, so that no plan counts on them. The node keeps a floor
for their epochs: (id, epoch) is used once, whoever still runs under it out there.

A controller that starts again waits a lease for the nodes that were there. Their workers serve
nobody meanwhile; those that their agent still has are adopted with the weights they have.
"""

from blitzd.control import moves
from blitzd.control.commands import EndWorker, ResetWorker
from blitzd.control.replicas import lose, lose_node
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.fsm import Agent, ClusterState, Replica, ReplicaState

S = ReplicaState
KEPT = frozenset(
    {
        S.INACTIVE,
        S.PREFILL,
        S.OLD_PREFILL,
        S.REFACTORY_PREFILL,
        S.DECODE,
        S.COLOCATED,
        S.SHUTTING_NULL,
    }
)
"""A worker in the middle of something else is not adopted. Live pairs end with a boot, and who
has all weights is a Prefill then."""
RESTARTED = "the controller was restarted"


def awaited(state: ClusterState) -> list[Replica]:
    """Of the state that a boot begins with: whose workers, on other nodes, may be adopted."""
    return [
        replica
        for replica in state.replicas.values()
        if replica.node in state.agents
        and (
            replica.worker == "awaited" or (replica.worker == "attached" and replica.state in KEPT)
        )
        and not replica.restart_epoch
    ]


def retire_others(turn: Turn) -> None:
    """At a boot: replicas of other nodes whose workers are not awaited."""
    kept = {replica.id for replica in awaited(turn.state)}
    for agent in _not_lost(turn):
        for replica in _replicas_of(turn, agent):
            if replica.id not in kept:
                if replica.worker != "absent":
                    turn.command(EndWorker(replica.id, replica.epoch))
                    lose(turn, replica, RESTARTED)
                turn.emit(ev.ReplicaRetired(replica.id))


def await_nodes(turn: Turn) -> None:
    """At a boot, once the requests and the live pairs of the last one are gone, and the
    replicas that are not awaited."""
    for agent in _not_lost(turn):
        for replica in _replicas_of(turn, agent):
            if replica.worker == "attached":
                turn.emit(ev.WorkerAwaited(replica.id, replica.epoch, f"awaited: {RESTARTED}"))
        if agent.phase == "present":
            turn.emit(ev.NodeAwaited(agent.node, agent.epoch))


def _not_lost(turn: Turn) -> list[Agent]:
    return [agent for agent in turn.state.agents.values() if agent.phase != "lost"]


def _replicas_of(turn: Turn, agent: Agent) -> list[Replica]:
    return [replica for replica in turn.state.replicas.values() if replica.node == agent.node]


def agent_joined(turn: Turn, joined: ev.AgentJoined) -> None:
    """Also of one that was restarted within its lease: its replicas go on."""
    if turn.state.node.phase != "running":
        return
    known = turn.state.agents.get(joined.node)
    if known is not None and known.phase == "awaited" and not _as_before(turn, known, joined):
        lose_node(turn, known, "it came back with another configuration")
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


def _as_before(turn: Turn, agent: Agent, joined: ev.AgentJoined) -> bool:
    offered = dict(joined.replicas)
    here = _replicas_of(turn, agent)
    same = all(offered.get(replica.id) == replica.configured for replica in here)
    return same and agent.address == joined.address


def agent_lost(turn: Turn, lost: ev.AgentLost) -> None:
    agent = turn.state.agents.get(lost.node)
    if agent is None or agent.phase == "lost" or agent.epoch != lost.epoch:
        turn.ignore(lost.node, lost.epoch)
    else:
        lose_node(turn, agent, lost.reason)


def worker_found(turn: Turn, found: ev.WorkerFound) -> None:
    replica = turn.state.replicas.get(found.replica)
    current = replica is not None and replica.epoch == found.epoch
    if replica is None or not current or replica.worker != "awaited":
        turn.ignore(found.replica, found.epoch)
        if replica is None or not current or replica.worker == "absent":
            turn.command(EndWorker(found.replica, found.epoch))  # nobody counts on it
        return
    if found.digest:
        _adopt(turn, replica, found)
    else:
        turn.emit(ev.WorkerAttached(replica.id, replica.epoch, found.pid))
    turn.command(ResetWorker(replica.id, replica.epoch))


def _adopt(turn: Turn, replica: Replica, found: ev.WorkerFound) -> None:
    """With its weights, in the role that it is to have now."""
    serves = replica.role != "spare"
    was = replica.null_role or (replica.role if serves else "decode")
    turn.emit(
        ev.WorkerAdopted(
            replica.id,
            replica.epoch,
            found.pid,
            was,
            found.digest,
            found.layers_total,
            found.bytes_total,
            found.block_tokens,
            found.blocks_total,
        )
    )
    if serves and not replica.cordoned:
        moves.reuse(turn, replica, replica.role)
