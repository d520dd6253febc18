"""Under load that steps up and down: no flapping, nothing lost, whatever the numbers."""

from itertools import pairwise

from hypothesis import given, settings, strategies as st

from blitzd.events import types as ev
from tests.control.harness import Harness
from tests.control.virtual_load import VirtualLoad

S = 10**9
WINDOW_S = 2


def cluster(replicas: int, **policy: int) -> Harness:
    policy = {
        "autoscale": 1,
        "scale_down_window_ms": WINDOW_S * 1000,
        "arrival_window_ms": WINDOW_S * 1000,
        "max_queued_requests": 100_000,
    } | policy
    return Harness(**policy).serving("prefill", "decode", *["spare"] * (replicas - 2))


@given(
    per_s=st.floats(0.5, 20),
    prompt=st.integers(1, 400),
    rate=st.integers(200, 5000),
    load_s=st.floats(0.01, 4),
    decode_s=st.floats(0.05, 3),
    observed=st.booleans(),
    replicas=st.integers(2, 12),
)
@settings(max_examples=15, deadline=None)
def test_a_step_turns_the_direction_at_most_once_in_a_window(
    per_s: float,
    prompt: int,
    rate: int,
    load_s: float,
    decode_s: float,
    observed: bool,
    replicas: int,
) -> None:
    """Peers #6 too: after a down, the same load brings no up."""
    world = cluster(replicas, prefill_tokens_per_s=0 if observed else rate)
    load = VirtualLoad(world, prefill_rate=rate, load_s=load_s, decode_s=decode_s)
    load.arrivals(5, 25, per_s, prompt)
    load.run(25)
    for role in ("prefill", "decode"):
        turns = load.turns(role, start=1)
        assert all(b - a >= WINDOW_S * S for a, b in pairwise(turns)), turns
    low, high = 1, replicas - 1
    plans = [event for _, event in load.events if isinstance(event, ev.PlanDecided)]
    for plan in plans:
        assert low <= plan.wanted_prefill <= high
        assert low <= plan.wanted_decode <= high
        assert plan.wanted_prefill + plan.wanted_decode <= replicas


@given(
    share=st.floats(0.05, 6),
    prompt=st.integers(100, 400),
    load_s=st.floats(0.01, 2),
    start=st.integers(1, 8),
)
@settings(max_examples=15, deadline=None)
def test_no_up_is_caused_by_its_own_down(
    share: float, prompt: int, load_s: float, start: int
) -> None:
    """Peers #6: a steady load on too many replicas. `share` replicas' worth arrive; once the
    planner has gone down, it stays there."""
    rate = 1000
    world = cluster(20, prefill_tokens_per_s=rate)
    for number in range(2, 1 + start):
        world.feed(ev.RoleRequested(f"r{number}", "prefill"))
        world.load(f"r{number}")
    load = VirtualLoad(world, prefill_rate=rate, load_s=load_s, decode_s=0.05)
    load.arrivals(0, 30, share * rate / prompt, prompt)
    load.run(30)
    wanted = [start, *(count for _, count in load.counts("prefill"))]
    went_down = [at for at in range(1, len(wanted)) if wanted[at] < wanted[at - 1]]
    if went_down:
        after = wanted[went_down[0] :]
        assert all(b <= a for a, b in pairwise(after)), wanted


def test_a_burst_is_followed_up_and_down_and_every_request_ends() -> None:
    world = cluster(10, prefill_tokens_per_s=1000)
    load = VirtualLoad(world, load_s=0.5)
    load.arrivals(2, 12, per_s=20, prompt=200)
    load.run(60)
    assert max(count for _, count in load.counts("prefill")) >= 4
    assert load.counts("prefill")[-1][1] == load.counts("decode")[-1][1] == 1
    ended = [event for _, event in load.events if isinstance(event, ev.RequestFinished)]
    assert len(ended) == 200
    assert world.state.requests == {}
    assert len(load.turns("prefill", 1)) == len(load.turns("decode", 1)) == 1


def test_an_idle_hour_writes_nothing() -> None:
    world = cluster(4)
    load = VirtualLoad(world)
    load.run(1)
    before = len(world.log)
    for _ in range(3600):
        world.now += S
        step = world.core.step(ev.Ticked(), world.now, 0)
        world.log += step.records
    assert len(world.log) == before
