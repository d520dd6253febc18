"""Weights between hosts whose links are limited, cut or stall."""

import asyncio
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from blitzd.engine.layout import read_model_file
from tests.engine.test_weight_transfers import LARGE, tokens
from tests.engine.test_worker import run
from tests.engine.workers import Zygote
from tests.hosts.netns import Hosts, hosts, why_not
from tests.hosts.transfers import (
    alone,
    begin,
    chained,
    multicast,
    receive,
    said,
    topology_of,
    workers,
)
from tests.tiny import make_tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

RATE_MBIT = 400.0
STALL_MBIT = 0.008
"""As good as nothing, on a link that is up."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "large", **LARGE)


@pytest.fixture
def made() -> Iterator[Hosts]:
    with hosts(4, RATE_MBIT) as joined:
        yield joined


def test_a_chain_brings_three_hosts_the_weights_while_one_by_one_takes_three_times_as_long(
    zygotes: Zygote, made: Hosts, model: Path, hollow: Path
) -> None:
    targets = ["h1", "h2", "h3"]
    took: dict[str, float] = {}

    async def talk() -> None:
        for way in ("chain", "alone"):
            async with workers(zygotes, made, 4) as clients:
                await receive(clients["h0"], model, [])
                topology = topology_of(made, made.goodput(0, 1))
                plans = chained(topology, "h0", targets)
                if way == "alone":
                    plans = alone("h0", targets)
                took[way] = max((await multicast(clients, hollow, plans)).values())
                expected = await tokens(clients["h0"])
                assert await tokens(clients["h3"]) == expected

    run(talk(), 120)
    print(f"chain {took['chain']:.2f} s, one by one {took['alone']:.2f} s")
    # Of links that are the bottleneck: three copies leave the source instead of one.
    assert took["alone"] / took["chain"] > 1.5


@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_a_middle_whose_link_fails_is_noticed_within_a_second_and_left_out(
    zygotes: Zygote, made: Hosts, model: Path, hollow: Path, fault: str
) -> None:
    async def talk() -> None:
        async with workers(zygotes, made, 4) as clients:
            await receive(clients["h0"], model, [])
            plans = chained(topology_of(made, 1.0), "h0", ["h1", "h2", "h3"])
            [chain] = plans
            loads = begin(clients, hollow, plans)
            middle, heir, last = chain.targets
            await asyncio.sleep(1.5)
            number = int(middle[1:])
            failed = time.time()
            if fault == "cut":
                made.cut(number)
            else:
                made.limit(number, STALL_MBIT)
            assert (await loads[heir]).source == "h0"
            assert (await loads[last]).source == heir
            [warning, *_] = said(zygotes, clients[heir], "weights stopped coming")
            noticed = timestamp(warning) - failed
            [whole] = said(zygotes, clients[heir], "weights received")
            size = read_model_file(model).layout.length
            print(f"{fault}: noticed after {noticed:.2f} s, {whole['taken']}")
            assert sum(whole["taken"].values()) == size
            assert len(whole["taken"]) == 2, "it was over before the fault"
            assert noticed < 1.0 + TURN_S
            # The one that was cut off is not stuck: it says that nobody can be reached.
            with pytest.raises(Exception, match=r"no sign of life|gave the transfer up"):
                await loads[middle]
            expected = await tokens(clients["h0"])
            assert await tokens(clients[heir]) == await tokens(clients[last]) == expected

    run(talk(), 120)


TURN_S = 0.5
"""For changing the link (two processes), and a thread that gets its turn on a busy box."""


def timestamp(record: dict[str, str]) -> float:
    return datetime.fromisoformat(record["timestamp"]).timestamp()
