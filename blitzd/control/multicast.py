"""Which device gives the weights to which: serial chains, as BlitzScale plans them.

A chain S -> T1 -> T2 -> ... takes about as long as one transfer, however long it is, since
every target forwards what arrives (its links are full duplex). The greedy, after the paper's
section 5.1:

1. Drop sources whose egress carries serving traffic (a prefill's KV leaves that way). One
   that shares such a link, or a link with another chain's, gives inside of its domain only.
2. Group targets by scale-up domain, those first that have a source inside, then the fastest:
   within a domain one copy from the network is enough, the rest is free beside it.
3. Hang each group onto the end of the chain that brings it the weights fastest; among equals
   one that ends in its domain, then in its leaf, then the shortest.

Only the end of a chain has a free egress, so a link's direction is used once and every
target has one source; what hangs onto an end that hangs there already makes no cycle.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from blitzd.control.topology import Device, Topology


class Chain(NamedTuple):
    source: str
    targets: tuple[str, ...]
    """In the order in which the bytes pass them."""


class _End(NamedTuple):
    """Where a chain ends now. Sorts best first."""

    slowness: int
    """Minus the rate at which the weights come out here."""
    hops: int
    device: str


ANYWHERE = ("", "")


def _places(device: Device) -> Iterator[tuple[str, str]]:
    """Under which the ends at this device are found."""
    yield ANYWHERE
    yield "domain", device.domain
    if device.leaf:
        yield "leaf", device.leaf


class _Ends:
    """Ends of chains by domain, by leaf and all together; used ones are skipped lazily."""

    def __init__(
        self,
        topology: Topology,
        sources: Iterable[str],
        targets: Iterable[str],
        busy_links: Collection[str],
    ) -> None:
        self._topology = topology
        self._busy = set(busy_links)
        """Links whose egress is in use."""
        self._heaps: dict[tuple[str, str], list[_End]] = defaultdict(list)
        self._used: set[str] = set()
        # Of thousands of sources few are near a target.
        near: set[tuple[str, str]] = set()
        for target in targets:
            near.update(_places(topology.devices[target]))
        heaps, anywhere = self._heaps, self._heaps[ANYWHERE]
        for source in sources:
            device = topology.devices[source]
            end = _End(-device.rate, 0, source)
            anywhere.append(end)
            if (domain := ("domain", device.domain)) in near:
                heaps[domain].append(end)
            if device.leaf and (leaf := ("leaf", device.leaf)) in near:
                heaps[leaf].append(end)
        for heap in heaps.values():
            heapq.heapify(heap)

    def add(self, end: _End) -> None:
        for place in _places(self._topology.devices[end.device]):
            heapq.heappush(self._heaps[place], end)

    def take(self, group: Sequence[str]) -> _End | None:
        """The best for these targets, which lie in one domain; it is no end any more."""
        device = self._topology.devices[group[0]]
        inside = self._best("domain", device.domain)
        found = inside or self._best_across(device.leaf, device.rate)
        if found is not None:
            self._used.add(found.device)
            link = self._topology.devices[found.device].link
            if link and inside is None:
                self._busy.add(link)
        return found

    def _best_across(self, leaf: str, rate: int) -> _End | None:
        near, anywhere = self._best("leaf", leaf), self._best(*ANYWHERE)
        if near is None or anywhere is None:
            return anywhere
        # A slow end near by is no better than a fast one anywhere.
        return near if min(-near.slowness, rate) >= min(-anywhere.slowness, rate) else anywhere

    def _best(self, kind: str, name: str) -> _End | None:
        heap = self._heaps.get((kind, name), [])
        while heap and not self._is_end(heap[0].device, kind != "domain"):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _is_end(self, device: str, across: bool) -> bool:
        if device in self._used:
            return False
        return not (across and self._busy and self._topology.devices[device].link in self._busy)


def plan(
    topology: Topology,
    sources: Iterable[str],
    targets: Collection[str],
    busy_egress: Collection[str] = (),
    busy_links: Collection[str] = (),
) -> list[Chain]:
    """Chains that bring every target the weights once, but those that no source is left for.

    `sources` hold the weights, or are the end of a chain that is under way, with a free
    egress except for those in `busy_egress`, whose outbound link carries serving traffic.
    Nothing leaves a domain over `busy_links`.
    """
    free = [source for source in sources if source not in busy_egress]
    ends = _Ends(topology, free, targets, busy_links)
    chains: dict[str, list[str]] = {}
    heads: dict[str, str] = {}
    reached: set[str] = set()
    sourced = {topology.devices[source].domain for source in free}
    groups = _groups(topology, targets, sourced, busy_links)
    # Those that find no end at first may hang onto one that came after them.
    for group in (*groups, *groups):
        if group[0] in reached or (end := ends.take(group)) is None:
            continue
        reached.add(group[0])
        head = heads.pop(end.device, end.device)
        chains.setdefault(head, []).extend(group)
        heads[group[-1]] = head
        rate = min(-end.slowness, topology.rate(end.device, group[0]))
        ends.add(_End(-rate, end.hops + len(group), group[-1]))
    return [Chain(head, tuple(chain)) for head, chain in chains.items()]


def _groups(
    topology: Topology, targets: Collection[str], sourced: set[str], busy_links: Collection[str]
) -> list[list[str]]:
    """By domain, `sourced` ones first, then the greatest sum of rates. Within a group the
    fastest first, but before them those that could not give to another domain."""
    groups: dict[str, list[tuple[bool, int, str]]] = defaultdict(list)
    for target in targets:
        device = topology.devices[target]
        groups[device.domain].append((device.link not in busy_links, -device.rate, target))
    ranked = sorted(
        (domain not in sourced, sum(rate for _, rate, _ in group), domain)
        for domain, group in groups.items()
    )
    return [[target for _, _, target in sorted(groups[domain])] for _, _, domain in ranked]


def arrivals(topology: Topology, chain: Chain, size: int, chunk: int) -> list[float]:
    """Seconds until each target of the chain has all `size` bytes: those take as long as on
    the slowest hop so far, and the last chunk is forwarded once more by each hop."""
    times, slowest, delay = [], 0.0, 0.0
    for source, target in zip((chain.source, *chain.targets), chain.targets, strict=False):
        rate = topology.rate(source, target)
        slowest = max(slowest, size / rate)
        times.append(slowest + delay)
        delay += min(chunk, size) / rate
    return times
