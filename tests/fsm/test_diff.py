"""Differences between two points of a log."""

import pytest
from hypothesis import given, settings, strategies as st

from blitzd.events import types as ev
from blitzd.fsm.diff import EVENTS_KEPT, Change, Differ
from blitzd.fsm.watched import WatchedState
from tests.control.harness import Harness, refold
from tests.fsm.test_fold import busy_log

LOG = busy_log()


def differ_between(first: int, last: int) -> Differ:
    state = WatchedState()
    for record in LOG[:first]:
        state.take(record)
    differ = Differ(state)
    for record in LOG[first:last]:
        differ.take(record)
    return differ


@given(st.tuples(*[st.integers(0, len(LOG))] * 2).map(sorted))
@settings(max_examples=40, deadline=None)
def test_it_is_what_two_folds_differ_in(cut: list[int]) -> None:
    first, last = cut
    found = {(c.entity, c.key, c.field): c for c in differ_between(first, last).changes()}
    before, after = refold(LOG[:first]), refold(LOG[:last])
    for (kind, key, field), change in found.items():
        was, now = before.entity(kind, key), after.entity(kind, key)
        if field:
            assert (change.before, change.after) == (getattr(was, field), getattr(now, field))
            assert change.before != change.after
        else:
            assert (was is None) != (now is None)
    for kind in ("replica", "request", "lease"):
        for key in getattr(before, f"{kind}s").keys() | getattr(after, f"{kind}s").keys():
            was, now = before.entity(kind, key), after.entity(kind, key)
            changed = any((kind, key) == name[:2] for name in found)
            assert changed == (was != now), (kind, key)


def change_of(changes: list[Change], key: str | int, field: str) -> Change:
    [found] = [c for c in changes if (c.key, c.field) == (key, field)]
    return found


def test_it_names_the_events_that_did_it() -> None:
    changes = differ_between(0, len(LOG)).changes()
    change = change_of(changes, "r2", "")
    assert change.before is None
    assert change.after["failures"] == 1
    [spawned] = [r.seq for r in LOG if isinstance(r.payload, ev.ReplicaRegistered)][2:3]
    assert spawned in change.events


def test_of_many_events_the_newest_are_named_and_all_are_counted() -> None:
    world = Harness().serving("prefill", "decode")
    state = WatchedState()
    for record in world.log:
        state.take(record)
    begun = len(world.log)
    for used in range(1, 31):
        world.feed(ev.OccupancyReported("r1", 1, used, 1))
    differ = Differ(state)
    for record in world.log[begun:]:
        differ.take(record)
    change = change_of(differ.changes(), "r1", "blocks_sampled")
    assert (change.before, change.after, change.event_count) == (0, 30, 30)
    assert change.events == tuple(r.seq for r in world.log[-2 * EVENTS_KEPT + 1 :: 2])


def test_what_came_and_went_is_counted() -> None:
    differ = differ_between(0, len(LOG))
    assert differ.passed == {"request": 2, "lease": 3}
    assert not any(c.entity == "request" and c.key in (1, 3) for c in differ.changes())


@pytest.mark.parametrize("at", [0, len(LOG) // 2, len(LOG)])
def test_between_a_point_and_itself_is_nothing(at: int) -> None:
    assert differ_between(at, at).changes() == []
