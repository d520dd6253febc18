"""Who decides the counts: the planner, an operator who set them, or nobody."""

import pytest

from blitzd.events import types as ev
from tests.control.harness import Harness, only
from tests.control.test_planner import PAIRS, planned, plans


def test_counts_that_an_operator_set_are_his() -> None:
    """Peers #11: two writers of one target. The second is told who the first is."""
    world = planned(*PAIRS, "spare")
    events = world.feed(ev.ScaleRequested(3, 1))
    assert only(events, ev.PlannerPinned).hold_ns == 0
    hold = only(world.after(10), ev.PlanHeld)
    assert (hold.prefill, hold.decode) == ("pinned", "pinned")
    world.arrive(1, prompt=3000)
    assert world.after(3_600_000) == []
    assert (world.state.node.wanted_prefill, world.state.node.wanted_decode) == (3, 1)
    assert only(world.feed(ev.ReleaseRequested()), ev.PlannerReleased).reason == "operator"
    assert only(world.after(10), ev.PlanDecided).wanted_prefill == 4, "all that there is"


def test_a_hold_ends_by_itself_if_it_has_an_end() -> None:
    world = planned(*PAIRS, manual_hold_ms=1000)
    world.feed(ev.ScaleRequested(2, 2))
    world.after(10)
    assert plans(world.after(980)) == []
    assert only(world.after(20), ev.PlannerReleased).reason == "hold is over"


def test_a_refused_scale_pins_nothing() -> None:
    world = planned(*PAIRS)
    assert only(world.feed(ev.ScaleRequested(0, 1)), ev.CommandRefused).command == "scale"
    assert not world.state.plan.pinned


def test_without_a_planner_nothing_is_pinned_and_release_is_refused() -> None:
    world = Harness().serving(*PAIRS)
    assert world.feed(ev.ScaleRequested(1, 1))
    assert world.state.entity("plan", 0) is None
    assert only(world.feed(ev.ReleaseRequested()), ev.CommandRefused).reason == (
        "the planner is off (autoscale is 0): nothing is pinned"
    )


def test_replicas_that_do_both_are_left_alone() -> None:
    world = planned("colocated", "colocated", "spare")
    assert world.after(60_000) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            (("prefill_use_low_ppm", 900_000),),
            "prefill_use_low_ppm is 900000; accepted: less than prefill_use_high_ppm, 800000",
        ),
        (
            (("max_decode", 2), ("min_decode", 3)),
            "min_decode is 3; accepted: up to max_decode, 2",
        ),
    ],
)
def test_bounds_that_cross_are_refused(changes: tuple[tuple[str, int], ...], reason: str) -> None:
    """P1: each value alone is right; together they would make it go up and down for ever."""
    world = planned("prefill", "decode")
    assert only(world.feed(ev.PolicyRequested(changes)), ev.CommandRefused).reason == reason
    off = (("prefill_use_low_ppm", 0), ("prefill_use_high_ppm", 0))
    assert only(world.feed(ev.PolicyRequested(off)), ev.PolicyChanged)


def test_the_planner_can_be_turned_on_and_off_while_the_daemon_runs() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    assert world.after(60_000) == []
    world.feed(ev.PolicyRequested((("autoscale", 1),)))
    assert only(world.after(10), ev.PlanHeld).prefill == "down_wait"
    world.feed(ev.PolicyRequested((("autoscale", 0),)))
    assert world.after(60_000) == []
