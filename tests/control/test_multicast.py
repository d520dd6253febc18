"""The plan of a multicast: who gives whom, how long it takes, how fast it is made."""

import time

import pytest
from hypothesis import given, strategies as st

from blitzd.control.multicast import Chain, arrivals, plan
from blitzd.control.topology import Device, Topology

MIB = 1 << 20
GB = 10**9


def topology(rates: list[int], per_domain: int = 1, per_leaf: int = 4) -> Topology:
    """Devices d000, d001, ..., so many a domain, so many domains a leaf."""
    return Topology(
        {
            f"d{i:03}": Device(f"n{i // per_domain:04}", f"l{i // per_domain // per_leaf}", rate)
            for i, rate in enumerate(rates)
        },
        scale_up_rate=200 * GB,
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Topology, list[str], list[str], set[str]]:
    count = draw(st.integers(1, 24))
    rates = draw(st.lists(st.sampled_from([1, 5, 12, 25]), min_size=count, max_size=count))
    shape = (draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4)))
    made = topology([rate * GB for rate in rates], *shape)
    roles = draw(st.lists(st.sampled_from("hho.t"), min_size=count, max_size=count))
    names = sorted(made.devices)
    holders = [n for n, role in zip(names, roles, strict=True) if role in "ho"]
    targets = [n for n, role in zip(names, roles, strict=True) if role == "t"]
    return made, holders, targets, {n for n, r in zip(names, roles, strict=True) if r == "o"}


@given(clusters())
def test_every_target_gets_the_weights_once_over_free_links(cluster) -> None:
    made, holders, targets, busy = cluster
    chains = plan(made, holders, targets, busy)
    free = set(holders) - busy
    reached = [target for chain in chains for target in chain.targets]
    assert sorted(reached) == (sorted(targets) if free else [])
    # Nobody gives to two, so that no link's direction is shared; a source is no target, so
    # that there is no cycle; and none carries KV the same way.
    hops = [pair for c in chains for pair in zip((c.source, *c.targets), c.targets, strict=False)]
    givers = [giver for giver, _ in hops]
    assert len(givers) == len(set(givers))
    assert {chain.source for chain in chains} <= free
    assert not busy & set(givers)


@given(clusters(), st.sampled_from([64 * MIB, 16 << 30]))
def test_no_plan_is_far_from_what_the_links_allow(cluster, size) -> None:
    """The lower bound: a domain takes the weights in no faster than over its fastest link, or
    from a source inside. The planned time is at most that of the slowest link passed, which
    is the bound when all are alike, and the chunks that each hop holds back."""
    made, holders, targets, busy = cluster
    sourced = {made.devices[h].domain for h in holders if h not in busy}
    for chain in plan(made, holders, targets, busy):
        times = arrivals(made, chain, size, MIB)
        assert times == sorted(times)
        passed = [made.devices[chain.source].rate]
        for target, took in zip(chain.targets, times, strict=True):
            device = made.devices[target]
            passed.append(device.rate)
            inside = device.domain in sourced
            beside = [
                made.devices[t].rate for t in targets if made.devices[t].domain == device.domain
            ]
            bound = size / (made.scale_up_rate if inside else max(beside))
            assert took >= bound * 0.999
            assert took <= (size + len(passed) * MIB) / min(passed)


def test_a_chain_takes_as_long_as_one_transfer_however_long_it_is() -> None:
    made = topology([12 * GB] * 65)
    names = sorted(made.devices)
    [chain] = plan(made, names[:1], names[1:])
    assert chain == Chain(names[0], tuple(names[1:]))
    times = arrivals(made, chain, 16 << 30, MIB)
    assert times[-1] / times[0] < 1.01
    alone = arrivals(made, Chain(names[0], (names[1],)), 16 << 30, MIB)[0]
    assert times[0] == alone == pytest.approx((16 << 30) / (12 * GB))


def test_the_fastest_come_first_so_that_slow_ones_do_not_hold_them_up() -> None:
    made = topology([25 * GB, 5 * GB, 25 * GB, 12 * GB])
    [chain] = plan(made, ["d000"], ["d001", "d002", "d003"])
    assert chain.targets == ("d002", "d003", "d001")


def test_sources_in_two_leaves_serve_their_own() -> None:
    made = topology([12 * GB] * 8, per_leaf=4)
    chains = plan(made, ["d000", "d004"], [f"d{i:03}" for i in (1, 2, 3, 5, 6, 7)])
    assert sorted(chains) == [
        Chain("d000", ("d001", "d002", "d003")),
        Chain("d004", ("d005", "d006", "d007")),
    ]


def test_a_neighbour_in_the_same_domain_is_better_than_any_network() -> None:
    made = topology([12 * GB, 12 * GB, 400 * GB], per_domain=2)
    [chain] = plan(made, ["d002", "d000"], ["d001"])
    assert chain == Chain("d000", ("d001",))
    assert arrivals(made, chain, 200 * GB, MIB) == [1.0]


def test_a_domain_takes_the_weights_from_the_network_once() -> None:
    made = topology([12 * GB] * 9, per_domain=1)
    grouped = Topology(
        {n: d._replace(domain="n8" if n != "d000" else "n0") for n, d in made.devices.items()},
        made.scale_up_rate,
    )
    [chain] = plan(grouped, ["d000"], sorted(made.devices)[1:])
    hops = zip((chain.source, *chain.targets), chain.targets, strict=False)
    assert [grouped.rate(*hop) for hop in hops] == [12 * GB] + [200 * GB] * 7


def test_a_prefill_that_emits_kv_gives_no_weights() -> None:
    made = topology([12 * GB] * 3)
    assert plan(made, ["d000"], ["d002"], busy_egress={"d000"}) == []
    assert plan(made, ["d000", "d001"], ["d002"], {"d000"}) == [Chain("d001", ("d002",))]


def sharing(*devices: tuple[str, str, str]) -> Topology:
    """(name, domain, link) each."""
    made = {name: Device(domain, "", 12 * GB, link) for name, domain, link in devices}
    return Topology(made, scale_up_rate=200 * GB)


TWO_ON_ONE = (("a", "n0", "n0/e0"), ("b", "n0", "n0/e0"))
TWO_OTHERS = (("t", "n1", "n1/e0"), ("u", "n2", "n2/e0"))


def test_two_on_one_link_are_one_source_for_the_network() -> None:
    made = sharing(*TWO_ON_ONE, *TWO_OTHERS)
    assert plan(made, ["a", "b"], ["t", "u"]) == [Chain("a", ("t", "u"))]
    apart = sharing(("a", "n0", "n0/e0"), ("b", "n0", "n0/e1"), *TWO_OTHERS)
    assert plan(apart, ["a", "b"], ["t", "u"]) == [Chain("a", ("t",)), Chain("b", ("u",))]


def test_over_a_link_with_kv_on_it_nothing_leaves_the_domain() -> None:
    made = sharing(*TWO_ON_ONE, *TWO_OTHERS)
    assert plan(made, ["a"], ["b", "t"], busy_links={"n0/e0"}) == [Chain("a", ("b",))]


def test_a_chain_leaves_a_domain_by_one_whose_link_is_free() -> None:
    made = sharing(("a", "n0", "n0/e0"), ("b", "n0", "n0/e1"), ("c", "n0", "n0/e0"), *TWO_OTHERS)
    [chain] = plan(made, ["a"], ["b", "c", "t"], busy_links={"n0/e0"})
    assert chain == Chain("a", ("c", "b", "t"))


@st.composite
def shared_links(draw: st.DrawFn) -> tuple[Topology, list[str], list[str], set[str]]:
    nics = draw(st.integers(1, 3))
    places = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, nics - 1)), max_size=20))
    roles = draw(st.lists(st.sampled_from("ht."), min_size=len(places), max_size=len(places)))
    devices = [(f"d{i:02}", f"n{n}", f"n{n}/e{e}") for i, (n, e) in enumerate(places)]
    named = dict(zip((name for name, _, _ in devices), roles, strict=True))
    links = sorted({link for _, _, link in devices})
    busy = draw(st.sets(st.sampled_from(links))) if links else set()
    of = {role: [name for name in named if named[name] == role] for role in "ht"}
    return sharing(*devices), of["h"], of["t"], busy


@given(shared_links())
def test_no_way_out_of_a_node_carries_two_things(cluster) -> None:
    made, holders, targets, busy = cluster
    chains = plan(made, holders, targets, busy_links=busy)
    reached = [target for chain in chains for target in chain.targets]
    assert len(reached) == len(set(reached)) and set(reached) <= set(targets)
    hops = [pair for c in chains for pair in zip((c.source, *c.targets), c.targets, strict=False)]
    at = made.devices
    across = [(a, b) for a, b in hops if at[a].domain != at[b].domain]
    out, into = [at[a].link for a, _ in across], [at[b].domain for _, b in across]
    assert len(out) == len(set(out)) and not busy & set(out)
    assert len(into) == len(set(into))
    # A domain that has the weights gets them from nowhere else, and never goes without.
    sourced = {at[name].domain for name in holders}
    assert not sourced & set(into)
    assert {t for t in targets if at[t].domain in sourced} <= set(reached)


@pytest.mark.parametrize("holders", [1, 2000])
def test_ten_thousand_replicas_on_1250_nodes_are_planned_within_50_ms(holders) -> None:
    made = topology([12 * GB] * 10_000, per_domain=8, per_leaf=32)
    names = list(made.devices)
    took = []
    for _ in range(5):
        began = time.process_time()
        chains = plan(made, names[:holders], names[holders:])
        took.append(time.process_time() - began)
    assert sum(len(chain.targets) for chain in chains) == 10_000 - holders
    print(f"{holders} holders: {min(took) * 1e3:.1f} ms")
    assert min(took) < 0.05
