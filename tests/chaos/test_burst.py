"""The planner in the whole driver, in virtual time: a burst, and then a quiet hour."""

import time

import anyio
import pytest
import trio
from trio.testing import MockClock

from blitzd.control.policy import Policy
from blitzd.events import types as ev
from tests.chaos import world as chaos
from tests.chaos.scenario import Faults, Scenario
from tests.chaos.workers import VirtualWorkers
from tests.chaos.world import World

HOUR_S = 3600.0
ROLES = ("prefill", "decode", *["spare"] * 6)


class Planned(Scenario):
    def policy(self, seed: int) -> Policy:
        return Policy(
            autoscale=1,
            prefill_tokens_per_s=1000,
            scale_down_window_ms=2000,
            arrival_window_ms=2000,
        )


class Burst(World):
    def __init__(self) -> None:
        super().__init__(seed=0)
        drawn = self.scenario
        changes = {
            "replicas": tuple((f"r{i}", role) for i, role in enumerate(ROLES)),
            "requests": 200,
            "rate": 25.0,
            "faults": Faults(),
            "autoscale": 1,
            **dict.fromkeys(("kills", "hangs", "slow", "disk_full", "commands"), 0),
            "leavers": 0.0,
        }
        fields = {name: getattr(drawn, name) for name in drawn.__dataclass_fields__}
        self.scenario = Planned(**(fields | changes))
        self.idle_records = self.idle_s = -1.0

    async def _settle(self, workers: VirtualWorkers) -> None:
        await super()._settle(workers)
        await anyio.sleep(60.0)  # down, and warm spares give up their weights
        before, started = len(self.disk.records), time.thread_time()
        await anyio.sleep(HOUR_S)
        self.idle_records = len(self.disk.records) - before
        self.idle_s = time.thread_time() - started


def test_a_burst_goes_up_and_back_and_a_quiet_hour_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chaos, "VIRTUAL_LIMIT_S", 2 * HOUR_S)
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[attr-defined]
    trio._core._run._r.seed(0)  # type: ignore[attr-defined]
    world = Burst()
    clock = MockClock(autojump_threshold=0)
    anyio.run(world.run, backend="trio", backend_options={"clock": clock})
    outcome = world.outcome
    # A client in twenty gives it two seconds, and a burst has to be seen before it is met.
    assert set(outcome.failed) <= {"deadline"}
    assert (outcome.accepted, outcome.finished + len(outcome.failed)) == (200, 200)
    assert outcome.finished >= 185
    plans = [r.payload for r in world.disk.records if isinstance(r.payload, ev.PlanDecided)]
    assert max(plan.wanted_prefill for plan in plans) >= 3
    assert (plans[-1].wanted_prefill, plans[-1].wanted_decode) == (1, 1)
    for role in ("prefill", "decode"):
        wanted = [1, *(getattr(plan, f"wanted_{role}") for plan in plans)]
        top = wanted.index(max(wanted))
        assert wanted[:top] == sorted(wanted[:top]), "up"
        assert wanted[top:] == sorted(wanted[top:], reverse=True), "and down"
    assert world.idle_records == 0
    assert world.idle_s < 20
