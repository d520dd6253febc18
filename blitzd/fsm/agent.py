"""Another node, as far as its agent has told."""

from collections.abc import Iterable
from typing import Any

import msgspec


class Agent(msgspec.Struct, omit_defaults=True, gc=False):
    node: str
    epoch: int = 0
    """Of the agent: counts its starts."""
    phase: str = "lost"
    """present, awaited (by a controller that was restarted) or lost. A lost one has no
    replicas."""
    address: str = ""
    version: str = ""
    arch: str = ""
    cpus: int = 0
    memory_mib: int = 0
    trouble: str = ""
    """Why it is lost."""
    epoch_floor: int = 0
    """No replica there has had a higher epoch before the ones it has now: a node that comes
    back has its replicas back under their names, but never a worker's identity again."""


def agents_json(agents: Iterable[Agent]) -> list[dict[str, Any]]:
    shown = ("node", "epoch", "phase", "address", "version", "arch", "cpus", "memory_mib")
    return [
        {name: getattr(agent, name) for name in (*shown, "trouble")}
        for agent in sorted(agents, key=lambda one: one.node)
    ]
