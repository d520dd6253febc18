"""The machines as the planner of transfers sees them: devices, their links, what joins them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.events.topology_events import number_of
from blitzd.fsm import ClusterState, Replica


class Device(NamedTuple):
    """Where one replica's weights lie, and its way out."""

    domain: str
    """Of scale-up: NVLink, or the memory of one machine. What moves inside costs no network."""
    leaf: str
    """The switch that its link ends in."""
    rate: int
    """Bytes a second, each way: links are full duplex, the ways do not disturb each other."""
    link: str = ""
    """NODE/NAME; devices with the same one share it. Empty: it has one of its own."""


@dataclass(frozen=True, slots=True)
class Topology:
    devices: Mapping[str, Device]
    scale_up_rate: int
    """Bytes a second between two devices of one domain."""
    domain_rates: Mapping[str, int] = field(default_factory=dict)
    """Of the domains that have another one."""

    def rate(self, source: str, target: str) -> int:
        """Of the path between two devices. Leaves are joined without loss: what a spine adds
        or takes away is not modelled (reference: BlitzScale 5.1 leaves it to ECMP)."""
        a, b = self.devices[source], self.devices[target]
        if a.domain == b.domain:
            return self.inside(a.domain)
        return min(a.rate, b.rate)

    def inside(self, domain: str) -> int:
        """Bytes a second between two devices of it."""
        return self.domain_rates.get(domain, self.scale_up_rate)


def topology_of(state: ClusterState, replicas: Iterable[Replica]) -> Topology:
    """Of these replicas' devices, as the configuration describes it. A node that it leaves out
    is a domain by itself, and each of its replicas has a link, as fast as the slowest that is
    described."""
    described = state.topology
    slowest = min((links.rate for links in described.values()), default=1)
    fastest = max((links.rate for links in described.values()), default=1)
    devices: dict[str, Device] = {}
    nodes: dict[str, tuple[Device, ...]] = {}
    for replica in replicas:  # they come by the thousand
        own = nodes.get(replica.node)
        if own is None:
            own = nodes[replica.node] = _devices(replica.node, described, slowest)
        devices[replica.id] = own[number_of(replica.id) % len(own)]
    rates = {
        links.domain or links.node: links.domain_rate
        for links in described.values()
        if links.domain_rate
    }
    return Topology(devices, 2 * fastest, rates)


def _devices(node: str, described: Mapping[str, ev.NodeLinks], slowest: int) -> tuple[Device, ...]:
    """One for each link, on which the node's replicas take turns."""
    links = described.get(node)
    if links is None:
        return (Device(node, "", slowest),)
    domain = links.domain or node
    return tuple(Device(domain, links.leaf, links.rate, name) for name in links.names)


def describe(turn: Turn, nodes: tuple[ev.NodeLinks, ...]) -> None:
    """What a boot brings, if it is not what is known."""
    known = tuple(links for _, links in sorted(turn.state.topology.items()))
    if nodes != known:
        turn.emit(ev.TopologyDescribed(nodes))
