"""Loads under way: by which rung each has its source, why by none before it, and the chains
that they make."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from blitzd.fsm.entities import Replica
from blitzd.fsm.table import LOADING

if TYPE_CHECKING:
    from blitzd.fsm.state import ClusterState

Skipped = tuple[tuple[str, str], ...]

REASONS_SINCE = 3
"""The core's version. A log of one before folds to what it folded to then, without them."""


def begin(state: "ClusterState", replica: Replica, rung: str, skipped: Skipped) -> None:
    if state.node.core_version >= REASONS_SINCE:
        replica.rung, replica.skipped = rung, skipped


def loads_json(state: "ClusterState") -> list[dict[str, Any]]:
    """Each that loads; by id."""
    return [
        {
            "replica": replica.id,
            "role": replica.role,
            "rung": replica.rung,
            "why_not": dict(replica.skipped),
            "source": replica.source,
            "peers": [f"{name}/{epoch}" for name, epoch in replica.peers],
            "shards": [f"{name}/{epoch}" for name, epoch in replica.shards],
            "layers_ready": replica.layers_ready,
            "layers_total": replica.layers_total,
            "seq": replica.since_seq,
        }
        for replica in state.in_states(*LOADING)
    ]


def chains_json(state: "ClusterState") -> list[dict[str, Any]]:
    """Who gives to whom now: each source that does not load, and those that hang onto it, in
    the order in which the bytes pass them. One that feeds several (a chain that healed, say)
    has a chain for each."""
    fed: dict[str, list[Replica]] = {}
    for replica in state.in_states(*LOADING):
        source = state.feeder(replica)
        if source is not None:
            fed.setdefault(source.id, []).append(replica)
    loading = {replica.id for targets in fed.values() for replica in targets}
    return [
        {"source": source, "targets": targets}
        for source in sorted(fed.keys() - loading)
        for targets in _paths(source, fed)
    ]


def _paths(source: str, fed: dict[str, list[Replica]]) -> Iterator[list[str]]:
    """Every way down from a source to an end. What feeds goes in no circle (an invariant)."""
    open_ = [(replica, [replica.id]) for replica in reversed(fed[source])]
    while open_:
        replica, path = open_.pop()
        below = fed.get(replica.id)
        if below is None:
            yield path
            continue
        # The path is copied where it forks, which it mostly does not.
        for one in reversed(below[1:]):
            open_.append((one, [*path, one.id]))
        path.append(below[0].id)
        open_.append((below[0], path))
