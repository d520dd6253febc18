"""Shards between hosts with two links each: half the time of one, and what a cut link costs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from blitzd.engine.coverage import shards
from blitzd.engine.layout import ALIGNMENT, read_model_file
from tests.engine.test_weight_transfers import LARGE, tokens
from tests.engine.test_worker import run
from tests.engine.workers import Zygote
from tests.hosts.netns import Hosts, hosts, why_not
from tests.hosts.transfers import (
    begin_shards,
    chained,
    multicast,
    receive,
    said,
    sharded,
    wide_topology,
    workers,
)
from tests.tiny import make_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

RATE_MBIT = 200.0
"""Of a link: one that two cores with other work keep busy."""
SCALE_UP = 10**12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "large", **LARGE)


@pytest.fixture
def made() -> Iterator[Hosts]:
    with hosts(3, RATE_MBIT, links=2) as joined:
        yield joined


def test_two_machines_take_half_of_it_over_each_of_their_two_links(
    zygotes: Zygote, made: Hosts, model: Path, hollow: Path
) -> None:
    took: dict[str, float] = {}
    topology = wide_topology(made, RATE_MBIT / 8 * 1e6, SCALE_UP)

    async def talk() -> None:
        for way in ("one link", "shards"):
            async with workers(zygotes, made, 3) as clients:
                await asyncio.gather(*(receive(clients[n], model, []) for n in ("h0.0", "h0.1")))
                plan = sharded(topology, "h0")
                if way == "one link":
                    plan = chained(topology, "h0.0", ["h1.0", "h2.0"])
                took[way] = max((await multicast(clients, hollow, plan)).values())
                if way == "shards":
                    check_who_brought_what(clients)
                expected = await tokens(clients["h0.0"])
                last = "h2.1" if way == "shards" else "h2.0"
                assert await tokens(clients[last]) == expected

    def check_who_brought_what(clients: dict) -> None:
        size = read_model_file(model).layout.length
        first, second = (end - start for start, end in shards(size, 2, ALIGNMENT))
        for host, upstream in ((1, "h0"), (2, "h1")):
            [loaded] = said(zygotes, clients[f"h{host}.1"], "weights received")
            names = [f"{upstream}.1", f"h{host}.0"]
            expected = [f"{name}/{clients[name].epoch}" for name in names]
            assert loaded["taken"] == dict(zip(expected, (second, first), strict=True))

    run(talk(), 180)
    print(f"one link {took['one link']:.2f} s, shards {took['shards']:.2f} s")
    assert took["shards"] / took["one link"] < 0.75


def test_a_shard_whose_link_is_cut_comes_over_the_neighbours(
    zygotes: Zygote, made: Hosts, model: Path, hollow: Path
) -> None:
    async def talk() -> None:
        async with workers(zygotes, made, 2) as clients:
            await asyncio.gather(*(receive(clients[n], model, []) for n in ("h0.0", "h0.1")))
            topology = wide_topology(made, RATE_MBIT / 8 * 1e6, SCALE_UP)
            small = type(topology)(
                {n: d for n, d in topology.devices.items() if d.domain != "h2"}, SCALE_UP
            )
            loads = begin_shards(clients, hollow, sharded(small, "h0"))
            await asyncio.sleep(1.5)
            made.cut(1, link=1)
            await asyncio.gather(*loads.values())
            [cut_off] = said(zygotes, clients["h1.1"], "weights received")
            names = {name: f"{name}/{clients[name].epoch}" for name in clients}
            assert set(cut_off["taken"]) == {names["h0.1"], names["h1.0"]}
            [neighbour] = said(zygotes, clients["h1.0"], "weights received")
            assert sum(neighbour["taken"].values()) == neighbour["bytes"]
            assert neighbour["taken"][names["h0.0"]] > neighbour["bytes"] // 2
            expected = await tokens(clients["h0.0"])
            assert await tokens(clients["h1.0"]) == await tokens(clients["h1.1"]) == expected

    run(talk(), 180)
