"""The plan of a sharded multicast: which link carries which shard, and how long that takes."""

import time

import pytest
from hypothesis import given, strategies as st

from blitzd.control import multicast
from blitzd.control.multicast import Chain
from blitzd.control.shards import Sharded, arrivals, plan
from blitzd.control.topology import Device, Topology

MIB = 1 << 20
GB = 10**9


def machines(*links: list[int], devices_a_link: int = 1) -> Topology:
    """Machines n0, n1, ... with links of those rates in GB/s; devices n0.0.0 (machine, link,
    number)."""
    devices = {
        f"n{m}.{link}.{number}": Device(f"n{m}", f"l{m // 4}", rate * GB, f"n{m}/eth{link}")
        for m, rates in enumerate(links)
        for link, rate in enumerate(rates)
        for number in range(devices_a_link)
    }
    return Topology(devices, scale_up_rate=200 * GB)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Topology, list[str], list[str], set[str], set[str]]:
    rates = st.lists(st.sampled_from([5, 12, 25]), min_size=1, max_size=4)
    made = machines(
        *draw(st.lists(rates, min_size=1, max_size=6)), devices_a_link=draw(st.integers(1, 2))
    )
    names = sorted(made.devices)
    roles = draw(st.lists(st.sampled_from("hhottti."), min_size=len(names), max_size=len(names)))
    named = {role: [n for n, r in zip(names, roles, strict=True) if r == role] for role in "hoti"}
    return made, named["h"] + named["o"], named["t"], set(named["o"]), set(named["i"])


def link(made: Topology, name: str) -> str:
    return made.devices[name].link


@given(clusters())
def test_every_domain_gets_every_byte_once_and_no_link_is_used_twice(cluster) -> None:
    made, holders, targets, busy, loading = cluster
    into = [link(made, name) for name in loading]
    plans = plan(made, holders, targets, busy, (), into)
    out = [link(made, name) for name in busy]
    reached: list[str] = []
    for sharded in plans:
        count = len(sharded.chains)
        assert count >= 2
        for place, beside in enumerate(sharded.beside):
            takers = [chain.targets[place] for chain in sharded.chains]
            # One for each shard, all of one domain: together they bring each byte once.
            domains = {made.devices[name].domain for name in (*takers, *beside)}
            assert len(domains) == 1
            reached += [*takers, *beside]
        for chain in sharded.chains:
            assert len(chain.targets) == len(sharded.beside)
            out += [link(made, giver) for giver in (chain.source, *chain.targets[:-1])]
            into += [link(made, taker) for taker in chain.targets]
    assert len(reached) == len(set(reached)) and set(reached) <= set(targets)
    used = (out[len(busy) :], into[len(loading) :])
    for links, taken in zip(used, (out[: len(busy)], into[: len(loading)]), strict=True):
        assert len(links) == len(set(links)) and not set(links) & set(taken)
    # A domain is served as a whole, or left to the chains.
    of = {made.devices[name].domain for name in reached}
    assert sorted(reached) == sorted(t for t in targets if made.devices[t].domain in of)


@given(clusters(), st.sampled_from([64 * MIB, 16 << 30]))
def test_no_plan_is_far_from_what_the_links_allow(cluster, size) -> None:
    """The bound: the arena over all links of the domain that the shards use, at the rate of
    the slowest passed, and the gather of what the others brought; beyond it, what each hop
    holds back of a chunk."""
    made, holders, targets, busy, loading = cluster
    into = [link(made, name) for name in loading]
    for sharded in plan(made, holders, targets, busy, (), into):
        count = len(sharded.chains)
        times = arrivals(made, sharded, size, MIB)
        for place, beside in enumerate(sharded.beside):
            takers = [chain.targets[place] for chain in sharded.chains]
            rates = [made.devices[name].rate for name in takers]
            passed = [
                made.devices[n].rate
                for chain in sharded.chains
                for n in (chain.source, *chain.targets[: place + 1])
            ]
            gather = size / made.scale_up_rate
            for name in (*takers, *beside):
                assert times[name] >= size / count / max(rates) * 0.999
                held_back = (place + 1) * MIB / min(passed)
                assert times[name] <= (size / count + 1) / min(passed) + gather + held_back
            if not busy and not loading:
                alone = multicast.arrivals(
                    made, Chain(sharded.chains[0].source, (takers[0],)), size, MIB
                )
                assert len(set(passed)) > 1 or max(times[n] for n in takers) < alone[0]


def test_two_machines_take_half_of_it_over_each_of_their_links() -> None:
    made = machines([12, 12], [12, 12], [12, 12])
    [sharded] = plan(made, ["n0.0.0", "n0.1.0"], [n for n in made.devices if n[1] in "12"])
    assert sharded == Sharded(
        (
            Chain("n0.0.0", ("n1.0.0", "n2.0.0")),
            Chain("n0.1.0", ("n1.1.0", "n2.1.0")),
        ),
        ((), ()),
    )
    size = 16 << 30
    times = arrivals(made, sharded, size, MIB)
    assert max(times.values()) == pytest.approx(size / 2 / (12 * GB) + size / 2 / (200 * GB), 1e-3)


def test_who_shares_a_link_with_a_taker_gathers() -> None:
    made = machines([12, 12], [12, 12], devices_a_link=2)
    targets = [name for name in made.devices if name.startswith("n1")]
    [sharded] = plan(made, ["n0.0.0", "n0.0.1", "n0.1.0"], targets)
    assert [chain.targets for chain in sharded.chains] == [("n1.0.0",), ("n1.1.0",)]
    assert sharded.beside == (("n1.0.1", "n1.1.1"),)


@pytest.mark.parametrize(
    ("links", "sources", "why"),
    [
        (([12, 12], [12]), ["n0.0.0", "n0.1.0"], "one link to the targets"),
        (([12], [12, 12]), ["n0.0.0"], "one source"),
        (([12, 12], [25, 1]), ["n0.0.0", "n0.1.0"], "a link so slow that half over it is later"),
        (([12, 12], [12, 12]), ["n0.0.0", "n0.1.0", "n1.0.0"], "a source inside"),
    ],
)
def test_where_shards_are_no_gain_it_is_left_to_a_chain(links, sources, why) -> None:
    made = machines(*links)
    targets = [n for n in made.devices if n.startswith("n1") and n not in sources]
    assert plan(made, sources, targets) == [], why
    assert multicast.plan(made, sources, targets)


def test_a_link_that_carries_kv_carries_no_shard() -> None:
    made = machines([12, 12, 12], [12, 12, 12], devices_a_link=2)
    sources = [name for name in made.devices if name.startswith("n0")]
    targets = ["n1.0.0", "n1.1.0", "n1.2.0"]
    # n0.0.1 emits KV: so n0.0.0, on the same link, gives nothing.
    [sharded] = plan(made, sources, targets, busy_egress={"n0.0.1"})
    assert [chain.source for chain in sharded.chains] == ["n0.1.0", "n0.2.0"]


def test_the_count_of_shards_is_what_serves_most_soonest() -> None:
    """One machine with four links, six with two: four shards would leave six to a chain."""
    made = machines([12] * 4, [12] * 4, *[[12] * 2] * 6)
    sources = [name for name in made.devices if name.startswith("n0")]
    targets = [name for name in made.devices if not name.startswith("n0")]
    plans = plan(made, sources, targets)
    assert [len(sharded.chains) for sharded in plans] == [2, 2]
    served = [t for s in plans for c in s.chains for t in c.targets]
    assert len(served) + sum(len(b) for s in plans for b in s.beside) == len(targets)


@pytest.mark.parametrize("holders", [8, 2000])
def test_ten_thousand_replicas_on_1250_nodes_are_planned_within_50_ms(holders) -> None:
    made = machines(*[[12] * 8] * 1250)
    names = list(made.devices)
    took = []
    for _ in range(5):
        began = time.process_time()
        plans = plan(made, names[:holders], names[holders:])
        took.append(time.process_time() - began)
    reached = sum(len(c.targets) for sharded in plans for c in sharded.chains)
    assert reached == 10_000 - holders
    print(f"{holders} holders: {min(took) * 1e3:.1f} ms")
    assert min(took) < 0.05
