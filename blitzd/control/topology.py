"""The machines as the planner of transfers sees them: devices, their links, what joins them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from blitzd.fsm import ClusterState


class Device(NamedTuple):
    """Where one replica's weights lie, and its way out."""

    domain: str
    """Of scale-up: NVLink, or the memory of one machine. What moves inside costs no network."""
    leaf: str
    """The switch that its link ends in."""
    rate: int
    """Bytes a second, each way: links are full duplex, the ways do not disturb each other."""


@dataclass(frozen=True, slots=True)
class Topology:
    devices: Mapping[str, Device]
    scale_up_rate: int
    """Bytes a second between two devices of one domain."""

    def rate(self, source: str, target: str) -> int:
        """Of the path between two devices. Leaves are joined without loss: what a spine adds
        or takes away is not modelled (reference: BlitzScale 5.1 leaves it to ECMP)."""
        a, b = self.devices[source], self.devices[target]
        if a.domain == b.domain:
            return self.scale_up_rate
        return min(a.rate, b.rate)


def topology_of(state: ClusterState) -> Topology:
    """Of a cluster whose links nobody has described: each node a domain, all links alike."""
    devices = {r.id: Device(r.node, "", 1) for r in state.replicas.values()}
    return Topology(devices, scale_up_rate=2)
