"""A cluster of any size, folded from the events that would have built it."""

from itertools import count

from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm import ClusterState, fold

BLOCKS = 256
PER_NODE = 8
MS = 1_000_000


NODES_PER_LEAF = 32


def large(
    prefill: int,
    decode: int,
    spare: int,
    *,
    described: bool = False,
    mixed: bool = False,
    **policy: int,
) -> Core:
    """All serve or are attached spares; the planner is on and has settled. `described`: each
    node has as many links as replicas, and so many nodes a leaf. `mixed`: some of each role on
    every node."""
    state, seq = ClusterState(), count(1)

    def emit(event: Payload) -> None:
        fold(state, Record(next(seq), 0, 0, 0, event))

    policy = {
        "autoscale": 1,
        "prefill_tokens_per_s": 1000,
        "max_prefill": 1_000_000,
        "max_decode": 1_000_000,
        "max_queued_requests": 1_000_000,
    } | policy
    emit(ev.NodeStarted(1, "test", "local", Policy(**policy).pairs(), CORE_VERSION))
    if described:
        links = tuple(f"eth{i}" for i in range(PER_NODE))
        nodes = [f"n{i}" for i in range(-(-(prefill + decode + spare) // PER_NODE))]
        described_nodes = (
            ev.NodeLinks(node, links, 12_500_000_000, f"l{i // NODES_PER_LEAF}")
            for i, node in enumerate(nodes)
        )
        emit(ev.TopologyDescribed(tuple(described_nodes)))
    roles = ["prefill"] * prefill + ["decode"] * decode + ["spare"] * spare
    if mixed:
        nodes_needed = -(-len(roles) // PER_NODE)
        roles = [role for node in range(nodes_needed) for role in roles[node::nodes_needed]]
    for number, role in enumerate(roles):
        name = f"r{number}"
        emit(ev.ReplicaRegistered(name, f"n{number // PER_NODE}", role))
        emit(ev.WorkerSpawning(name, 1))
        emit(ev.WorkerAttached(name, 1, 1000 + number))
        if role != "spare":
            emit(ev.LoadStarted(name, 1, role, "host"))
            emit(ev.LoadFinished(name, 1, "d", "map", 30, 1000, 64, BLOCKS))
        if role == "decode":
            emit(ev.DecodeOpened(name, 1))
    state.hash()  # as in a log that grew: what is hashed later is what changed
    return Core(state)
