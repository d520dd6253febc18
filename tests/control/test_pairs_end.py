"""However a live pair ends, no event leaves half of it behind (the harness looks after each)."""

import pytest

from blitzd.control.core import CORE_VERSION
from blitzd.events import types as ev
from tests.control.harness import Harness, ReplicaState, only


@pytest.fixture
def paired() -> Harness:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))
    assert world.replica("r0").state is ReplicaState.OLD_PREFILL
    return world


@pytest.mark.parametrize("lost", ["r0", "r2"])
def test_by_the_death_of_a_side(paired: Harness, lost: str) -> None:
    events = paired.feed(ev.WorkerExited(lost, 1, "killed"))
    kinds = [type(event) for event in events]
    assert kinds.index(ev.PairBroken) < kinds.index(ev.WorkerLost)
    assert paired.state.pairs == {}


def test_by_a_load_that_fails(paired: Harness) -> None:
    failed = ev.LoadEnded("r2", 1, "", "map", 30, 0, 64, 0, "digest differs")
    kinds = [type(event) for event in paired.feed(failed)]
    assert kinds.index(ev.PairBroken) < kinds.index(ev.LoadFailed)
    assert paired.replica("r0").state is ReplicaState.PREFILL


def test_by_the_end_of_the_server(paired: Harness) -> None:
    events = paired.feed(ev.StopRequested("SIGTERM", paired.now))
    assert only(events, ev.PairBroken).reason == "the server stopped"
    assert paired.state.pairs == {}


def test_by_a_restart_that_finds_no_worker(paired: Harness) -> None:
    roles = (("r0", "prefill"), ("r1", "decode"))
    booted = ev.Booted(2, "test", "local", roles, paired.policy.pairs(), CORE_VERSION)
    events = paired.feed(booted)
    only(events, ev.PairBroken)
    assert paired.state.pairs == {}
    assert "r2" not in paired.state.replicas
