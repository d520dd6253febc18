"""Hand-overs of KV under way, and the links that one has failed on."""

from collections.abc import Iterable
from typing import Any

import msgspec


class Lease(msgspec.Struct, omit_defaults=True, gc=False):
    """A KV transfer under way. Its blocks are reserved on both sides."""

    id: int
    request_id: int
    source: str
    source_epoch: int
    target: str
    target_epoch: int
    opened_ns: int
    expires_ns: int
    """Unless the target gets on; then later, but not after `cap_ns`."""
    cap_ns: int = 0
    bytes_moved: int = 0
    """When the target last said so."""
    rest: str = ""
    """Who has the layers from `split_layer` on, of KV that lies on two replicas."""
    rest_epoch: int = 0
    split_layer: int = 0


class Link(msgspec.Struct, omit_defaults=True, gc=False):
    """One that works has none. Of these lives of both ends: a new one starts afresh."""

    source: str
    source_epoch: int
    target: str
    target_epoch: int
    faults: int = 0
    """In a row."""
    fault: str = ""
    reason: str = ""
    """Of the last one."""
    lease_id: int = 0
    cool_ns: int = 0
    """Nothing goes over it until then; 0: one hand-over at a time may try it."""

    @property
    def key(self) -> str:
        return link_key(self.source, self.target)


def link_key(source: str, target: str) -> str:
    return f"{source}>{target}"


def faulty_json(links: Iterable[Link]) -> list[dict[str, Any]]:
    """Links whose last hand-over failed."""
    return [
        {
            "source": link.source,
            "target": link.target,
            "faults": link.faults,
            "fault": link.fault,
            "reason": link.reason,
            "cool_until_ns": link.cool_ns,
        }
        for link in sorted(links, key=lambda link: link.key)
    ]
