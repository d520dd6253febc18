"""The planner in whole turns of the core: the nine cases, waits, owners, records."""

import pytest

from blitzd.control.explain import Explainer
from blitzd.control.redecide import redecide
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm import ClusterState, ReplicaState
from blitzd.fsm.standing import standings
from tests.control.harness import Harness, only, refold
from tests.control.virtual_load import VirtualLoad

S = ReplicaState
PAIRS = ("prefill", "prefill", "decode", "decode")


def planned(*roles: str, **policy: int) -> Harness:
    policy = {"autoscale": 1, "prefill_tokens_per_s": 1000, "plan_tick_ms": 1} | policy
    return Harness(**policy).serving(*roles)


def plans(events: list[Payload]) -> list[ev.PlanDecided]:
    return [event for event in events if isinstance(event, ev.PlanDecided)]


def held(events: list[Payload]) -> list[ev.PlanHeld]:
    return [event for event in events if isinstance(event, ev.PlanHeld)]


def events_of(world: Harness) -> list[Payload]:
    return [record.payload for record in world.log]


def occupy(world: Harness, blocks: int) -> None:
    """Of both decode replicas together."""
    for replica in ("r2", "r3"):
        world.feed(ev.OccupancyReported(replica, 1, blocks // 2, 1))


# 2 of each. At 1000 tokens/s, 1200 tokens are for 2 to 3 replicas and 1500 for 3; of 64
# blocks each, 60 are for 2 to 3 replicas and 120 for 3 to 5, with those of 1500 tokens to 6.
WAITING = {"up": 1500, "stay": 1200, "down": 0}
BLOCKS = {"up": 120, "stay": 60, "down": 0}
NINE = [(p, d) for p in WAITING for d in BLOCKS]


@pytest.mark.parametrize(("prefill", "decode"), NINE)
def test_the_nine_cases(prefill: str, decode: str) -> None:
    """Reference 4.2: one ladder for all of them, whatever the other role does."""
    world = planned(
        *PAIRS,
        *["spare"] * 8,
        scale_down_window_ms=50,
        decode_reserve_tokens=1,
        arrival_window_ms=100_000,
        max_prefills_per_replica=1,
    )
    occupy(world, BLOCKS["stay" if decode == "up" else decode])
    if prefill == "stay":
        world.arrive(1, prompt=WAITING["stay"])
    world.after(10)
    if prefill == "up":
        for request_id in range(2):
            world.arrive(request_id, prompt=750)
    occupy(world, BLOCKS[decode])
    events = world.after(60)
    if (prefill, decode) == ("stay", "stay"):
        assert plans(events) == []
        return
    plan = only(events, ev.PlanDecided)
    assert plan.prefill == {"stay": "steady"}.get(prefill, prefill)
    assert plan.decode == {"stay": "steady"}.get(decode, decode)
    assert plan.wanted_prefill == {"up": 3, "stay": 2, "down": 1}[prefill]
    ahead = 1 if prefill == "up" and decode == "up" else 0
    assert plan.wanted_decode == {"up": 4 + ahead, "stay": 2, "down": 1}[decode]
    after = {r: world.state.index.roles[r] for r in ("prefill", "decode")}
    assert after == {"prefill": plan.wanted_prefill, "decode": plan.wanted_decode}
    if (prefill, decode) == ("down", "up"):
        assert only(events, ev.MutationStarted).role == "decode", "before any load"
    if decode == "down":
        assert [e.replica for e in events if isinstance(e, ev.ReplicaExpired)]


def test_a_role_s_window_is_its_own() -> None:
    """Peers #8: state is by role and in the fold. Prefill up does not begin decode's anew."""
    policy = {"scale_down_window_ms": 1000, "decode_reserve_tokens": 1}
    world = planned(*PAIRS, "spare", "spare", **policy)
    world.arrive(1, prompt=1100)
    assert only(world.after(10), ev.PlanHeld).decode == "down_wait"
    world.arrive(2, prompt=500)
    assert only(world.after(500), ev.PlanDecided).prefill == "up"
    assert only(world.after(501), ev.PlanDecided).decode == "down"


def test_two_planners_share_nothing() -> None:
    """Peers #8: no module globals. Interleaved, each decides what it decides alone."""
    alone, one, other = (planned(*PAIRS, scale_down_window_ms=1000) for _ in range(3))
    for number, ms in enumerate((10, 400, 400, 400)):
        other.arrive(number, prompt=1200)
        other.after(ms)
        assert one.after(ms) == alone.after(ms)


def test_no_traffic_at_all_goes_to_the_minimum_within_the_window() -> None:
    """Peers #3: nothing was ever measured, and that is no reason to skip."""
    world = planned("prefill", "prefill", "prefill", "decode", prefill_tokens_per_s=0)
    assert only(world.after(10), ev.PlanHeld).prefill == "down_wait"
    assert plans(world.after(4_980)) == []
    plan = only(world.after(20), ev.PlanDecided)
    assert (plan.prefill, plan.wanted_prefill, plan.wanted_decode) == ("down", 1, 1)
    assert world.state.index.roles["prefill"] == 1


def test_a_load_of_exactly_zero_goes_to_the_minimum_after_there_was_one() -> None:
    """Peers #9."""
    world = planned("prefill", "decode", *["spare"] * 6)
    load = VirtualLoad(world)
    load.arrivals(0, 10, per_s=3, prompt=1000)
    load.run(60)
    assert max(wanted for _, wanted in load.counts("prefill")) >= 4
    assert load.counts("prefill")[-1][1] == 1
    assert load.counts("decode")[-1][1] == 1
    assert world.state.requests == {}


def test_the_planner_compares_what_is_there() -> None:
    """Peers #4: two of three prefills are drained by hand. That three were wanted does not
    mean that three are there."""
    world = planned("prefill", "decode", "spare", "spare", decode_reserve_tokens=1)
    world.arrive(1, prompt=1500)
    assert only(world.after(10), ev.PlanDecided).wanted_prefill == 3
    for replica in ("r2", "r3"):
        world.load(replica)
    assert only(world.after(10), ev.PlanHeld).prefill == "steady"
    for replica in ("r2", "r3"):
        world.feed(ev.DrainRequested(replica, 0))
    hold = only(world.after(10), ev.PlanHeld)
    assert (hold.prefill, dict(hold.inputs)["prefill_ready"]) == ("no_spare", 1)
    world.feed(ev.UndrainRequested("r2"))
    assert standings(world.state)["prefill", "ready"] == 2
    assert world.after(10) == [], "still one too few, which is no news"


def test_a_dead_replica_is_replaced_and_not_counted_on() -> None:
    world = planned("prefill", "prefill", "decode", "spare", min_prefill=2)
    world.after(10)
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    plan = only(world.after(10), ev.PlanDecided)
    assert plan.prefill == "up"
    assert dict(plan.inputs)["prefill_dead"] == 1
    assert plan.wanted_prefill == 3, "two that count, and the one that is tried again"
    assert world.replica("r3").role == "prefill"


def test_counts_that_cannot_be_had_are_given_up() -> None:
    """One of two was drained and there is no other: the second is wanted no more, and not
    raised when it comes back for another reason."""
    world = planned("prefill", "prefill", "decode", "decode", "spare")
    for request_id in range(2):
        world.arrive(request_id, prompt=900)
    assert only(world.after(10), ev.PlanDecided).wanted_prefill == 3
    world.load("r4")
    for replica in ("r0", "r1"):
        world.feed(ev.DrainRequested(replica, 0))
    for request_id in range(2):
        world.feed(ev.ClientLeft(request_id))
    plan = only(world.after(10), ev.PlanDecided)
    assert (plan.prefill, plan.wanted_prefill) == ("observed", 1)


def test_prefill_that_goes_up_takes_decode_along() -> None:
    """The paper's pre-scaling (P6): what waits now is KV soon. 40 requests of 3 blocks and 4
    for their output need 280 blocks of 51 each."""
    world = planned("prefill", "decode", *["spare"] * 12, decode_reserve_tokens=256)
    for request_id in range(40):
        world.arrive(request_id, prompt=192, max_tokens=300)
    plan = only(world.after(10), ev.PlanDecided)
    terms = dict(plan.terms)
    assert terms["decode_use_least"] == 0
    assert terms["decode_ahead_least"] == 6
    assert (plan.prefill, plan.decode) == ("up", "up")


def test_spares_that_are_too_few_are_shared_decode_first() -> None:
    world = planned("prefill", "decode", "spare", "spare", "spare")
    for request_id in range(40):
        world.arrive(request_id, prompt=192, max_tokens=300)
    plan = only(world.after(10), ev.PlanDecided)
    assert (plan.wanted_prefill, plan.wanted_decode) == (2, 3)
    assert "no_spare" in plan.clamps
    hold = only(world.after(10), ev.PlanHeld)
    assert hold.prefill == "no_spare"


def test_it_is_not_idle_before_it_was_ready() -> None:
    """Peers #19: a load that takes longer than the window is not scaled down meanwhile."""
    world = planned("prefill", "decode", "spare", scale_down_window_ms=1000)
    world.arrive(1, prompt=1500)
    only(world.after(10), ev.PlanDecided)
    world.first_token(1)
    world.imported(1)
    world.ended(1)
    assert only(world.after(10), ev.PlanHeld).prefill == "loading"
    assert world.after(60_000) == []
    world.load("r2")
    assert only(world.after(10), ev.PlanHeld).prefill == "down_wait"
    assert plans(world.after(980)) == []
    assert only(world.after(20), ev.PlanDecided).prefill == "down"


def test_the_next_way_down_waits_for_the_drain_of_the_last() -> None:
    """Peers #6: until the work that was left there is done, the rest have not felt it."""
    world = planned("prefill", "prefill", "prefill", "decode", scale_down_window_ms=1000)
    for request_id in range(3):
        world.arrive(request_id, prompt=300)
    assert only(world.after(10), ev.PlanHeld).prefill == "down_wait"
    assert only(world.after(1000), ev.PlanDecided).wanted_prefill == 2
    assert world.replica("r0").state is S.SHUTTING_PREFILL
    for request_id in (1, 2):
        world.first_token(request_id)
        world.imported(request_id)
    assert only(world.after(10), ev.PlanHeld).prefill == "draining"
    assert plans(world.after(60_000)) == []
    world.first_token(0)
    world.imported(0)
    assert only(world.after(10), ev.PlanHeld).prefill == "down_wait"


def test_a_replica_that_drains_from_one_role_is_no_spare_of_the_other() -> None:
    """It is revived for its own, and has to finish before it is of use to another: what was
    asked for is asked for once."""
    world = planned("prefill", "prefill", "decode", scale_down_window_ms=0, max_prefill=1)
    world.arrive(1, prompt=100)
    world.arrive(2, prompt=100)
    world.after(10)
    world.after(10)
    [draining] = [r for r in world.state.replicas.values() if r.state is S.SHUTTING_PREFILL]
    world.feed(ev.OccupancyReported("r2", 1, 60, 1))
    assert only(world.after(10), ev.PlanHeld).decode == "no_spare"
    assert world.after(1000) == []
    assert draining.state is S.SHUTTING_PREFILL


def test_what_comes_and_goes_between_two_looks_is_demand() -> None:
    """Peers #22: at no tick does anything wait, yet one replica is busy nine tenths."""
    world = planned("prefill", "decode", "spare", decode_reserve_tokens=1)
    load = VirtualLoad(world, decode_s=0.001)
    load.arrivals(0.002, 9.002, per_s=20, prompt=45)  # 45 ms of work between two ticks
    load.run(9)
    seen = [e for _, e in load.events if isinstance(e, ev.PlanHeld | ev.PlanDecided)]
    assert all(dict(e.inputs)["waiting_tokens"] == 0 for e in seen)
    [up] = [e for e in seen if isinstance(e, ev.PlanDecided)]
    assert (up.prefill, up.wanted_prefill) == ("up", 2)
    assert dict(up.terms)["prefill_use_least"] == 2


def test_a_rate_that_nobody_told_is_observed() -> None:
    world = planned("prefill", "decode", prefill_tokens_per_s=0)
    load = VirtualLoad(world, prefill_rate=2000)
    load.arrivals(0, 5, per_s=10, prompt=150)
    load.run(6)
    assert world.state.plan.prefilled.per_s() == pytest.approx(2000, rel=0.01)
    words = [e.prefill for _, e in load.events if isinstance(e, ev.PlanHeld)]
    assert words == ["no_rate", "steady"], "until the first have been computed"


def test_waiting_writes_nothing() -> None:
    world = planned("prefill", "decode")
    world.after(10)
    before = len(world.log)
    for _ in range(200):
        world.after(50)
    assert len(world.log) == before


def test_a_load_that_swings_around_a_bound_does_not_flood_the_log() -> None:
    """Waits begin at most once in a tick; a change of counts is rarer still."""
    world = planned(*PAIRS, plan_tick_ms=250)
    before = len(world.log)
    for number in range(400):
        occupy(world, BLOCKS["stay"] if number % 2 else BLOCKS["down"])
        world.after(50)
    written = [e for e in events_of(world)[before:] if isinstance(e, ev.PlanHeld)]
    assert len(written) <= 2 * 400 * 50 // 250


def test_a_wait_remembers_the_most_that_was_needed() -> None:
    world = planned(*["prefill"] * 6, "decode", scale_down_window_ms=1000)
    assert only(world.after(10), ev.PlanHeld).prefill_peak == 1
    world.arrive(1, prompt=1400)
    assert only(world.after(200), ev.PlanHeld).prefill_peak == 3
    world.first_token(1)
    assert held(world.after(100)) == []
    assert only(world.after(700), ev.PlanDecided).wanted_prefill == 3


def test_a_start_begins_every_window_anew() -> None:
    """The core's clock does not go on over a start."""
    world = planned(*PAIRS, scale_down_window_ms=1000)
    world.after(10)
    world.now = 0
    roles = tuple((f"r{i}", role) for i, role in enumerate(PAIRS))
    adopted = tuple((f"r{i}", 1, 100 + i) for i in range(4))
    world.feed(ev.Booted(2, "test", "local", roles, world.policy.pairs(), 3, adopted))
    assert only(world.after(10), ev.PlanHeld).prefill == "down_wait"
    assert plans(world.after(980)) == []
    assert plans(world.after(20))


def test_what_was_decided_is_decided_again_and_folds_to_the_same() -> None:
    world = planned("prefill", "decode", "spare", "spare")
    load = VirtualLoad(world)
    load.arrivals(0, 5, per_s=3, prompt=1000)
    load.run(30)
    assert plans(events_of(world))
    result = redecide(world.log)
    assert (result.difference, result.skipped) == (None, 0)
    assert refold(world.log).hash() == world.state.hash()
    copied = ClusterState.decode(world.state.encode())
    assert copied.hash() == world.state.hash()


def test_a_decision_is_explained_with_its_terms() -> None:
    world = planned("prefill", "decode", *["spare"] * 5)
    world.arrive(1, prompt=3000)
    world.after(10)
    [seq] = [r.seq for r in world.log if isinstance(r.payload, ev.PlanDecided)]
    explainer = Explainer(seq, ClusterState())
    for record in world.log:
        if not explainer.see(record):
            break
    found = explainer.finish()
    assert found is not None
    assert found.facts["why"]["prefill"] == "1 → 6: the load needs 5 to 6"
    assert found.facts["terms"]["prefill_backlog"] == (
        "3000 tokens wait, a replica computes 1000 in a second: 5 keep that below 700 ms,"
        " 6 below 500 ms"
    )
