"""Sharded multicast: a machine with several links takes a shard of the weights in over each.

After the original's Tanz and the paper's section 5.1. With k sources, each on a link of its
own, and machines whose targets have k links, the arena is cut into k ranges; range i goes
down a chain of its own through the i-th link of each machine, and the targets of a machine
gather the others' ranges over its scale-up means (NVLink, or memory). That takes a k-th of
the time of a chain.

To the chains' planner such a machine is one wide device, and k sources together are one.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from blitzd.control import multicast
from blitzd.control.multicast import Chain
from blitzd.control.topology import Device, Topology


class Sharded(NamedTuple):
    """One multicast in as many shards as it has chains."""

    chains: tuple[Chain, ...]
    """The i-th brings shard i. What stands at one place of each is of one domain."""
    beside: tuple[tuple[str, ...], ...]
    """At each place, the targets of that domain that take no shard: they gather all."""


def plan(
    topology: Topology,
    sources: Iterable[str],
    targets: Collection[str],
    busy_egress: Collection[str] = (),
    busy_out: Collection[str] = (),
    busy_in: Collection[str] = (),
) -> list[Sharded]:
    """Multicasts that bring whole domains the weights, each byte once over the network.

    `sources` and `busy_egress` are as in `multicast.plan`; nothing leaves a domain over the
    links `busy_out` or comes in over `busy_in`. Targets that it leaves out are better served
    by a chain: those of a domain with a source inside, or with fewer free links than there
    are shards.
    """
    busy_out = {*busy_out, *(topology.devices[name].link for name in busy_egress)}
    givers = _one_a_link(topology, sources, busy_out)
    inside = {topology.devices[giver].domain for giver in givers}
    domains: dict[str, list[str]] = defaultdict(list)
    for target in targets:
        if topology.devices[target].domain not in inside:
            domains[topology.devices[target].domain].append(target)
    takers = {d: _one_a_link(topology, group, busy_in) for d, group in domains.items()}
    sizes = {domain: len(group) for domain, group in domains.items()}
    count = _shards(topology, givers, takers, sizes)
    if count == 1:
        return []
    wide = {d: links[:count] for d, links in takers.items() if len(links) >= count}
    sets = [givers[i : i + count] for i in range(0, len(givers) - count + 1, count)]
    found = []
    for head, places in _chains(topology, sets, wide, busy_out):
        chains = (
            Chain(sets[head][i], tuple(wide[place][i] for place in places)) for i in range(count)
        )
        beside = (
            tuple(t for t in sorted(domains[place]) if t not in wide[place]) for place in places
        )
        found.append(Sharded(tuple(chains), tuple(beside)))
    return found


def _one_a_link(topology: Topology, names: Iterable[str], busy: Collection[str]) -> list[str]:
    """The first of each link that is not busy, the fastest links first. A device whose link
    nobody has described may share it: it is left out."""
    devices = topology.devices
    seen = {"", *busy}
    found = []
    for name in sorted(names, key=lambda n: _order(devices[n], n)):
        link = devices[name].link
        if link not in seen:
            seen.add(link)
            found.append(name)
    return found


def _order(device: Device, name: str) -> tuple[int, str, str, str, str]:
    # Those of one machine next to each other, its links in the order of their names, so that
    # links of the same name meet where networks are built that way (rails).
    return -device.rate, device.leaf, device.domain, device.link, name


def _shards(
    topology: Topology,
    givers: Sequence[str],
    takers: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
) -> int:
    """How many shards bring the weights to all targets soonest, on average; 1: none. `takers`
    and `sizes`, the count of targets, are by domain."""
    most = min(len(givers), max(map(len, takers.values()), default=0))
    if most < 2:
        return 1
    devices = topology.devices
    targets: Counter[tuple[tuple[int, ...], int]] = Counter()
    """By the rates of a domain's links and inside it: machines are mostly alike."""
    for domain, links in takers.items():
        if links:
            rates = tuple([devices[name].rate for name in links])
            targets[rates, topology.inside(domain)] += sizes[domain]

    def seconds(count: int) -> float:
        """Of all targets together, for a byte of the weights."""
        total = 0.0
        for (rates, inside), size in targets.items():
            k = count if len(rates) >= count else 1
            slowest = min(rates[k - 1], devices[givers[k - 1]].rate)
            total += size * (1 / (k * slowest) + (k - 1) / (k * inside))
        return total

    return min(range(1, most + 1), key=seconds)


def _chains(
    topology: Topology,
    sets: Sequence[Sequence[str]],
    wide: dict[str, list[str]],
    busy_out: Collection[str],
) -> list[tuple[int, tuple[str, ...]]]:
    """(which set of sources, the domains in the order in which the bytes pass them)."""

    def one(name: str, members: Sequence[str]) -> Device:
        # Its slowest link is the last.
        first, last = topology.devices[members[0]], topology.devices[members[-1]]
        return Device(name, first.leaf, last.rate, name)

    heads = {f"source {index}": index for index in range(len(sets))}
    places = {f"target {domain}": domain for domain in wide}
    devices = {name: one(name, sets[index]) for name, index in heads.items()}
    devices |= {name: one(name, wide[domain]) for name, domain in places.items()}
    busy = {
        name
        for name, domain in places.items()
        if busy_out and any(topology.devices[member].link in busy_out for member in wide[domain])
    }
    flat = Topology(devices, topology.scale_up_rate)
    chains = multicast.plan(flat, heads, list(places), busy_links=busy)
    return [(heads[c.source], tuple(places[name] for name in c.targets)) for c in chains]


def arrivals(topology: Topology, sharded: Sharded, size: int, chunk: int) -> dict[str, float]:
    """Seconds until each target has all `size` bytes: the slowest shard of its domain, and
    then, as if none of it had been gathered meanwhile, the others' over scale-up means."""
    shard = -(-size // len(sharded.chains))
    times = [multicast.arrivals(topology, chain, shard, chunk) for chain in sharded.chains]
    found: dict[str, float] = {}
    for place, beside in enumerate(sharded.beside):
        slowest = max(chain[place] for chain in times)
        takers = [chain.targets[place] for chain in sharded.chains]
        inside = topology.inside(topology.devices[takers[0]].domain)
        found |= dict.fromkeys(takers, slowest + (size - shard) / inside)
        found |= dict.fromkeys(beside, slowest + size / inside)
    return found
