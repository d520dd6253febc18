"""Events about the network between nodes (170-179)."""

import re

import msgspec

from blitzd.events.record import Durability, Kind, Payload, record_type


class NodeLinks(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What joins one node to the others, as the configuration says. It holds no containers but
    tuples, so that no reference cycle can go through one."""

    node: str
    links: tuple[str, ...]
    """Of the network, by name. Replicas take turns on them, by their number."""
    rate: int
    """Bytes a second of each link, each way: they are full duplex."""
    leaf: str = ""
    """The switch that the links end in."""
    domain: str = ""
    """Of scale-up; empty: the node alone."""
    domain_rate: int = 0
    """Bytes a second inside the domain; 0: not told, but more than over a link."""

    def link_of(self, replica: str) -> str:
        """NODE/LINK of a replica there, the same for all of its epochs: they take turns, as on
        the node's devices."""
        last = re.findall(r"\d+", replica)[-1:] or ["0"]
        return f"{self.node}/{self.links[int(last[0]) % len(self.links)]}"


@record_type(170, Kind.EVENT, Durability.ACK)
class TopologyDescribed(Payload, frozen=True, array_like=True):
    """The configuration describes these nodes' links from here on, and no others'."""

    nodes: tuple[NodeLinks, ...]
