"""What New plans from: its own clock, and what it has run."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blitzd.engine import live_plan
from blitzd.engine.live_plan import LivePlanner, Observed
from blitzd.sched.pair_model import Arrival
from blitzd.sched.zigzag_targets import plan_targets

LAYERS = 7


def observed(ready: int, now_ns: int = 0, each_ns: int = 6000) -> Observed:
    """`ready` layers came, the newest at `now_ns`, one in `each_ns`."""
    found = Observed(LAYERS)
    for layer in range(ready + 1):
        found.came(layer, now_ns - (ready - layer) * each_ns)
    found.ran(10, 1000)
    return found


def test_only_the_first_layer_is_news_of_itself() -> None:
    found = Observed(LAYERS)
    assert [found.came(layer, layer) for layer in range(4)] == [False, True, False, False]
    late = Observed(LAYERS)
    assert late.came(3, 9), "the embedding and three layers at once"
    assert late.came_ns == [9] * 4


def test_a_layers_time_follows_the_tokens() -> None:
    assert Observed(LAYERS).layer_ns(10) == 0
    assert observed(1).layer_ns(25) == 2500


def test_layers_are_expected_at_the_rate_at_which_they_came() -> None:
    found = observed(2, now_ns=20_000)
    pair = found.pair([(3, 1000, 2), (4, 2000, 0)], now_ns=21_000)
    assert pair is not None
    assert pair.ready_ns == (0, 0, 5000, 11_000, 17_000, 23_000, 29_000)
    assert pair.arrivals == (Arrival(0, 1000, 2), Arrival(0, 2000, 0))
    late = found.pair([(3, 1000, 2)], now_ns=30_000)
    assert late is not None and late.ready_ns[2] == 1, "one that is late is not there"


def test_old_is_expected_when_what_it_took_is_over() -> None:
    found = observed(1)
    found.given(3000, now_ns=10_000)
    found.given(2000, now_ns=11_000)
    pair = found.pair([(1, 1000, 0)], now_ns=12_000)
    assert pair is not None and pair.old_free_ns == 3000


@pytest.mark.parametrize(
    ("ready", "waiting"),
    [(0, [(1, 1000, 0)]), (LAYERS, [(1, 1000, 0)]), (2, []), (2, [(1, 0, 0)])],
    ids=["no layer", "all layers", "no request", "nothing has run"],
)
def test_there_is_nothing_to_plan(ready: int, waiting: list[tuple[int, int, int]]) -> None:
    assert observed(ready).pair(waiting, 0) is None


class Steps:
    """A step loop's face to the planner."""

    def __init__(self, found: Observed, waiting: list[tuple[int, int, int]]) -> None:
        self.set: list[Mapping[int, int]] = []
        live = SimpleNamespace(backlog=waiting, observed=found, set_targets=self.set.append)
        self._stepper = SimpleNamespace(live=live)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[Any]:
        yield self._stepper


def planned(steps: Steps, times: int) -> None:
    async def talk() -> None:
        planner = LivePlanner(cast(Any, steps))
        async with asyncio.timeout(20):
            for count in range(1, times + 1):
                planner.replan()
                while len(steps.set) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        await planner.close()

    asyncio.run(talk())


def test_a_plan_that_holds_is_set_by_order_of_arrival() -> None:
    """Layers that are so slow to come that only the first can be used."""
    second = 10**9
    waiting = [(order, second, 0) for order in range(11, 16)]
    steps = Steps(observed(1, now_ns=time.monotonic_ns(), each_ns=10 * second), waiting)
    planned(steps, 2)
    assert steps.set == [dict.fromkeys(range(11, 16), 1)] * 2


def test_without_a_plan_that_holds_there_are_no_targets() -> None:
    second = 10**9
    waiting = [(order, second, 0) for order in range(1, 8)]
    found = observed(1, now_ns=time.monotonic_ns(), each_ns=6 * second)
    pair = found.pair(waiting, time.monotonic_ns())
    assert pair is not None and plan_targets(pair) is None
    steps = Steps(found, waiting)
    planned(steps, 1)
    assert steps.set == [{}]


def test_a_solver_that_fails_leaves_the_queues_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(pair: object) -> None:
        raise RuntimeError("no licence")

    monkeypatch.setattr(live_plan, "plan_targets", broken)
    second = 10**9
    steps = Steps(observed(1, now_ns=time.monotonic_ns()), [(1, second, 0)])
    planned(steps, 1)
    assert steps.set == [{}]
