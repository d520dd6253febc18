"""The zigzag: BlitzScale's queue policy, its integer programme, and the model of a pair.

Numbers of the programme are from exhaustive search over all splits (L, t, N as named).
"""

from collections import defaultdict
from itertools import pairwise, product

import pytest
from hypothesis import given, settings, strategies as st

from blitzd.sched.pair_model import Arrival, Outcome, Pair, Run, simulate
from blitzd.sched.zigzag import Policy, Waiting, next_for_old, next_on_new, pending_cap
from blitzd.sched.zigzag_plan import Programme, solve
from blitzd.sched.zigzag_targets import plan_targets, planner_for, validated


def paper(layers: int, layer_load: int, count: int) -> Programme:
    return Programme(layers, 1, layer_load, [1.0] * count, [0] * count)


def paper_pair(layers: int, layer_load: int, count: int) -> Pair:
    ready = tuple(layer_load * k for k in range(layers))
    return Pair(ready, tuple(Arrival(0, 1) for _ in range(count)))


@pytest.mark.parametrize(
    ("layers", "load", "split", "times", "mean"),
    [
        (7, 6, [1, 1, 1], [6, 12, 18], 12.0),
        (7, 6, [1, 1, 1, 1], [6, 12, 18, 24], 15.0),
        (7, 6, [1, 1, 1, 1, 1], [6, 12, 18, 24, 30], 18.0),
        (7, 6, [1, 2, 2, 2, 2, 2], [6, 11, 16, 21, 26, 31], 18.5),
        (7, 6, [1, 5, 2, 5, 2, 4, 4], [6, 8, 13, 15, 20, 23, 26], 111 / 7),
        (7, 2, [1, 5, 2, 5], [6, 8, 13, 15], 10.5),
        (8, 3, [1, 6, 2, 5], [7, 9, 15, 18], 12.25),
    ],
)
def test_the_programme_has_the_values_of_exhaustive_search(
    layers: int, load: int, split: list[int], times: list[int], mean: float
) -> None:
    programme = paper(layers, load, len(split))
    assert programme.source_times(split) == times
    assert programme.allows(split)
    assert programme.objective(split) == pytest.approx(mean)
    solved = solve(programme)
    assert solved is not None and programme.allows(solved)
    assert programme.objective(solved) == pytest.approx(mean)
    if len(split) <= 5:
        tried = product(range(1, layers + 1), repeat=len(split))
        best = min(programme.objective(t) for t in tried if programme.allows(t))
        assert best == pytest.approx(mean)


def test_the_constraint_as_printed_rejects_what_the_correction_allows() -> None:
    """L=7, t=6, N=7, i=2, T=(1,2): as printed 6*2 <= 1 + 6*1 is false; 6*(2-1) <= 7 holds."""
    (row, most) = paper(7, 6, 7).rows()[1]
    left = row[0] * 1 + row[1] * 2
    assert left <= most
    assert left + 6 > most, "with layer 1 still to come"


def test_request_3_of_the_paper_ends_at_17() -> None:
    """S1 + S2 = 12, and its own five layers: in the sum, and on the model's clock."""
    assert paper(7, 6, 3).source_times([1, 1, 2]) == [6, 12, 17]
    assert simulate(paper_pair(7, 6, 7)).finish_ns[2] == 17


def test_best_effort_forces_one_layer_on_six_requests() -> None:
    outcome = simulate(paper_pair(7, 6, 7), Policy.BEST_EFFORT)
    assert outcome.splits(7)[1:6] == [1] * 5
    free, stopped = (
        simulate(paper_pair(7, 6, 7), policy).finish_ns
        for policy in (Policy.ILP_FREE, Policy.STOP_THE_WORLD)
    )
    assert sum(free) < sum(outcome.finish_ns) < sum(stopped)


def test_the_optimum_for_seven_requests_is_optimistic_and_not_used() -> None:
    """Request 2 would need five layers long before they have arrived."""
    split = [1, 5, 2, 5, 2, 4, 4]
    assert simulate(paper_pair(7, 6, 7), targets=dict(enumerate(split))).early > 0
    assert not validated(paper_pair(7, 6, 7), split)
    assert plan_targets(paper_pair(7, 6, 7)) is None
    assert plan_targets(paper_pair(7, 6, 5)) == [1, 1, 1, 1, 1]


def test_what_cannot_be_a_programme_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ready: 0; must be in 1\.\.7"):
        Programme(7, 0, 6, [1.0], [0])
    with pytest.raises(ValueError, match="2 and 1 requests"):
        Programme(7, 1, 6, [1.0, 1.0], [0])
    with pytest.raises(ValueError, match="ascending"):
        Pair((3, 2), (Arrival(0, 1),))
    with pytest.raises(ValueError, match="order of at_ns"):
        Pair((1, 2), (Arrival(5, 1), Arrival(4, 1)))


# -- one decision at a time ---------------------------------------------------------------


def test_new_runs_the_earliest_request_whose_next_layer_is_there() -> None:
    first, second, third = Waiting(0, 2), Waiting(1, 1), Waiting(2, 0)
    queue = [first, second, third]
    assert next_on_new(queue, ready=2, layers=4) is second
    assert next_on_new(queue, ready=3, layers=4) is first
    assert next_on_new([first], ready=2, layers=4) is None
    assert next_on_new(queue, 2, 4, targets={1: 1, 2: 1}) is third, "short of its target"


def test_old_takes_the_earliest_or_waits_for_its_layer() -> None:
    first, second = Waiting(0, 1), Waiting(1, 0)
    queue = [first, second]
    assert next_for_old(queue, None, ready=2, layers=4) is first
    assert next_for_old(queue, first, ready=2, layers=4) is None
    assert next_for_old(queue, second, ready=2, layers=4) is first
    assert next_for_old([], None, ready=2, layers=4) is None
    assert next_for_old(queue, first, ready=4, layers=4) is second, "the head is New's"
    assert next_for_old(queue, None, ready=4, layers=4) is second
    assert next_for_old([first], None, ready=4, layers=4) is None


def test_old_waits_for_a_target_only_while_new_can_reach_it() -> None:
    first = Waiting(0, 1)
    assert next_for_old([first], None, ready=2, layers=4, targets={0: 2}) is None
    assert next_for_old([first], None, ready=1, layers=4, targets={0: 2}) is first


def test_the_cap_falls_to_two() -> None:
    ms = 1_000_000
    assert [pending_cap(t * ms) for t in (0, 199, 200, 399, 400, 10_000)] == [4, 4, 3, 3, 2, 2]


# -- the model of a pair ------------------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn, together: bool = False, first_at: int | None = None) -> Pair:
    layers = draw(st.integers(1, 9))
    gaps = draw(st.lists(st.integers(0, 12), min_size=layers, max_size=layers))
    if first_at is not None:
        gaps[0] = first_at
    ready = tuple(sum(gaps[: k + 1]) for k in range(layers))
    count = draw(st.integers(1, 8))
    latest = 0 if together else ready[-1] + 10
    times = sorted(draw(st.integers(0, latest)) for _ in range(count))
    arrivals = tuple(Arrival(at, draw(st.integers(1, 4))) for at in times)
    cap = None if together else draw(st.sampled_from([None, lambda _: 2]))
    return Pair(ready, arrivals, old_free_ns=draw(st.integers(0, 9)), cap=cap)


def check(pair: Pair, outcome: Outcome) -> None:
    """Layers run once and in order, none before it is there or its request; nobody runs two
    things at a time; every request ends."""
    by_request: dict[int, list[Run]] = defaultdict(list)
    for side in (True, False):
        runs = sorted((r for r in outcome.runs if r.on_new is side), key=lambda r: r.begin_ns)
        for before, after in pairwise(runs):
            assert before.end_ns <= after.begin_ns
    for run in outcome.runs:
        by_request[run.request].append(run)
        arrival = pair.arrivals[run.request]
        assert run.begin_ns >= arrival.at_ns
        assert run.end_ns - run.begin_ns == (run.last - run.first) * arrival.layer_ns
        if run.on_new:
            assert pair.ready_ns[run.last - 1] <= run.begin_ns
        else:
            assert run.begin_ns >= pair.old_free_ns
            assert run.last == pair.layers, "Old runs to the end"
    for index in range(len(pair.arrivals)):
        runs = sorted(by_request[index], key=lambda r: r.first)
        layers = [layer for run in runs for layer in range(run.first, run.last)]
        assert layers == list(range(pair.layers))
        for before, after in pairwise(runs):
            assert before.end_ns <= after.begin_ns
        assert outcome.finish_ns[index] == runs[-1].end_ns


@settings(max_examples=300, deadline=None)
@given(pairs(), st.sampled_from([p for p in Policy if p is not Policy.ILP]))
def test_no_layer_runs_twice_or_is_skipped(pair: Pair, policy: Policy) -> None:
    check(pair, simulate(pair, policy))


@settings(max_examples=40, deadline=None)
@given(pairs())
def test_nor_with_plans_made_at_every_arrival(pair: Pair) -> None:
    check(pair, simulate(pair, Policy.ILP, planner_for(pair)))


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_old_takes_requests_in_order_of_arrival_during_the_load(pair: Pair) -> None:
    outcome = simulate(pair)
    taken = [r.request for r in outcome.runs if not r.on_new and r.begin_ns < pair.loaded_ns]
    assert taken == sorted(taken)


@settings(max_examples=200, deadline=None)
@given(pairs(together=True, first_at=0))
def test_a_plan_that_is_used_never_stalls_and_is_no_worse(pair: Pair) -> None:
    split = plan_targets(pair)
    planned = simulate(pair, Policy.ILP, planner_for(pair))
    check(pair, planned)
    assert sum(planned.finish_ns) <= sum(simulate(pair).finish_ns)
    if split is not None:
        assert planned.stall_ns == 0 and planned.early == 0


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_a_live_new_helps(pair: Pair) -> None:
    """What New does early never makes the last request end later than stop-the-world does by
    more than the layer that it cannot be interrupted in."""
    slack = max(one.layer_ns for one in pair.arrivals) * pair.layers
    live, stopped = simulate(pair), simulate(pair, Policy.STOP_THE_WORLD)
    assert max(live.finish_ns) <= max(stopped.finish_ns) + slack
