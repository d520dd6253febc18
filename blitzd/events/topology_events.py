"""Events about the network between nodes (170-179)."""

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

    @property
    def names(self) -> tuple[str, ...]:
        """NODE/LINK of each."""
        return tuple(f"{self.node}/{link}" for link in self.links)

    def link_of(self, replica: str) -> str:
        """NODE/LINK of a replica there, the same for all of its epochs: they take turns, as on
        the node's devices."""
        return self.names[number_of(replica) % len(self.links)]


def number_of(replica: str) -> int:
    """3 of r3 and of NODE.r3."""
    digits = replica.rpartition("r")[2]
    return int(digits) if digits.isdecimal() else 0


@record_type(170, Kind.EVENT, Durability.ACK)
class TopologyDescribed(Payload, frozen=True, array_like=True):
    """The configuration describes these nodes' links from here on, and no others'."""

    nodes: tuple[NodeLinks, ...]
