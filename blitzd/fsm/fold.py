"""The fold: what each record does to the state."""

from blitzd.events.record import Kind, Record
from blitzd.fsm import (
    fold_agents,
    fold_links,
    fold_node,
    fold_pairs,
    fold_plan,
    fold_pool,
    fold_replicas,
    fold_requests,
    fold_restarts,
    fold_roles,
    fold_topology,
)
from blitzd.fsm.folding import FOLDERS
from blitzd.fsm.state import ClusterState

# Importing them registers their folders.
SUBJECTS = (
    fold_agents,
    fold_node,
    fold_replicas,
    fold_roles,
    fold_pairs,
    fold_plan,
    fold_requests,
    fold_restarts,
    fold_links,
    fold_topology,
    fold_pool,
)


def fold(state: ClusterState, record: Record) -> None:
    """Applies one record. Inputs only move the sequence and the clock.

    Raises IllegalEvent or IllegalTransition, and then the state is as it was.
    """
    if record.payload.kind is Kind.EVENT:
        folder = FOLDERS.get(type(record.payload))
        if folder is not None:
            folder(state, record.payload, record)
    state.seq = record.seq
    state.mono_ns = record.mono_ns
