"""A decision that breaks is a defect of ours, and takes nothing else with it."""

import pytest

from blitzd.control import roles
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.fsm import RequestState
from tests.control.harness import Harness


def test_what_was_decided_before_it_stands_and_the_next_input_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Harness().serving("prefill", "decode")

    def broken(turn: Turn) -> None:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(roles, "settle", broken)
        step = world.core.step(ev.RequestArrived(1, 8, 4, 0, 0), world.now, 0)
    assert isinstance(step.fault, ZeroDivisionError)
    assert [type(r.payload) for r in step.records] == [ev.RequestArrived, ev.RequestAccepted]
    assert world.request_state(1) is RequestState.QUEUED
    after = world.core.step(ev.Ticked(), world.now, 0)
    assert after.fault is None
    assert world.request_state(1) is RequestState.PREFILLING


def test_what_is_no_input_is_an_error_of_the_caller() -> None:
    world = Harness().serving("prefill", "decode")
    with pytest.raises(KeyError):
        world.core.step(ev.NodeStopped("no"), world.now, 0)
