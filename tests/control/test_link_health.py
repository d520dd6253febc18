"""Links that a hand-over failed on: they rest, are tried, heal; nobody is stuck by them."""

import pytest

from blitzd.control.commands import ImportKv, StartPrefill
from blitzd.control.explain import Explainer
from blitzd.events import types as ev
from blitzd.fsm import ClusterState
from tests.control.harness import MS, Harness, RequestState, only


def handing_over(world: Harness, request_id: int) -> ImportKv | None:
    world.arrive(request_id)
    world.first_token(request_id)
    world.sent[request_id] = 1
    calls = world.commanded(ImportKv)
    return calls[0] if calls else None


def broken(world: Harness, request_id: int, fault: str = "stalled") -> list[object]:
    lease = world.state.requests[request_id].lease_id
    return list(world.feed(ev.ImportEnded(lease, 0, 0, fault, "no byte came")))


def serving(*roles: str, **policy: int) -> Harness:
    world = Harness(**policy).serving(*roles)
    world.after(ms=1)
    return world


def links(world: Harness) -> dict[str, tuple[int, bool]]:
    """Faults, and whether it cools."""
    return {key: (link.faults, link.cool_ns > 0) for key, link in world.state.links.items()}


def test_others_are_preferred_while_a_link_cools_and_it_heals_by_a_success() -> None:
    world = serving("prefill", "decode", "decode", link_cooldown_ms=1000)
    assert handing_over(world, 1).target == "r1"
    cooled = only(broken(world, 1), ev.LinkCooled)
    assert (cooled.source, cooled.target, cooled.lease_id) == ("r0", "r1", 1)
    assert (cooled.fault, cooled.until_ns) == ("stalled", world.now + 1000 * MS)
    assert [c.target for c in world.commanded(ImportKv)] == ["r2"]
    world.imported(1)
    # r2 has more to do by now, and still gets it.
    assert handing_over(world, 2).target == "r2"
    world.imported(2)
    assert only(world.after(ms=1000), ev.LinkReopened).target == "r1"
    assert links(world) == {"r0>r1": (1, False)}
    assert handing_over(world, 3).target == "r1"
    # One at a time, until it has proved itself.
    assert handing_over(world, 4).target == "r2"
    assert only(world.imported(3), ev.LinkHealed).lease_id == world.state.node.next_lease - 2
    assert world.state.links == {}
    assert handing_over(world, 5).target == "r1"


def test_each_failure_in_a_row_doubles_the_rest_up_to_a_bound() -> None:
    world = serving("prefill", "decode", link_cooldown_ms=100, link_cooldown_max_ms=350)
    rests = []
    for request_id in range(1, 6):
        handing_over(world, request_id)
        rests.append(only(broken(world, request_id), ev.LinkCooled).until_ns - world.now)
        world.feed(ev.ClientLeft(request_id))
        world.after(ms=350)
    assert rests == [ms * MS for ms in (100, 200, 350, 350, 350)]


def test_transfers_that_break_together_are_one_failure() -> None:
    world = serving("prefill", "decode", max_imports_per_replica=2)
    for request_id in (1, 2):
        assert handing_over(world, request_id)
    for request_id in (1, 2):
        broken(world, request_id)
    assert links(world) == {"r0>r1": (1, True)}


def test_a_request_waits_for_its_only_link_and_keeps_nobody_behind_it() -> None:
    world = serving("prefill", "prefill", "decode", link_cooldown_ms=1000)
    handing_over(world, 1)
    broken(world, 1)  # resumed: its only target failed it
    world.after(ms=100)
    assert world.state.requests[1].source == "r1", "computed where the link is good"
    world.first_token(1)
    assert [c.source for c in world.commanded(ImportKv)] == ["r1"]
    world.imported(1)
    # One whose KV lies at the bad link waits; one that came later and lies well does not.
    world.feed(ev.DrainRequested("r1", 0))
    handing_over(world, 2)
    assert world.state.requests[2].source == "r0"
    assert world.request_state(2) is RequestState.MIGRATING
    assert not world.state.requests[2].lease_id
    world.feed(ev.UndrainRequested("r1"))
    assert handing_over(world, 3).source == "r1"
    world.after(ms=900)
    assert [c.request_id for c in world.commanded(ImportKv)] == [2], "cool again"


def test_for_a_long_rest_it_is_computed_where_the_links_are_better() -> None:
    policy = {"link_cooldown_ms": 60_000, "link_wait_ms": 5000, "resume_backoff_ms": 1}
    world = serving("prefill", "prefill", "decode", **policy)
    for request_id in (1, 2):
        world.arrive(request_id)
    assert [world.state.requests[i].source for i in (1, 2)] == ["r0", "r1"]
    for request_id in (1, 2):
        world.first_token(request_id)
        world.sent[request_id] = 1
    world.imported(2)
    world.arrive(3)
    assert world.state.requests[3].source == "r0"
    broken(world, 1)
    world.sent[3] = 1
    world.first_token(3)
    resumed = [r.payload for r in world.log if isinstance(r.payload, ev.RequestResumed)][-1]
    assert (resumed.request_id, resumed.cause) == (3, "links_down")
    assert resumed.reason == "its links to r2 are down"
    assert world.state.requests[3].source == "r1"


def test_what_may_not_be_computed_again_waits_for_a_link_and_is_served() -> None:
    """Its KV is whole: a link that is down for long is no reason to fail it."""
    world = serving("prefill", "prefill", "decode", link_cooldown_ms=60_000, link_wait_ms=1)
    handing_over(world, 1)
    world.feed(ev.RequestArrived(2, 100, 64, 7, 0, resumable=0))
    assert world.state.requests[2].source == "r0"
    broken(world, 1)
    world.feed(ev.ClientLeft(1))
    world.sent[2] = 1
    world.first_token(2)
    assert world.request_state(2) is RequestState.MIGRATING
    world.after(ms=60_000)
    world.imported(2)
    only(world.ended(2), ev.RequestFinished)


def test_with_nowhere_better_it_waits_and_is_served_in_the_end() -> None:
    world = serving("prefill", "decode", link_cooldown_ms=60_000, link_wait_ms=1)
    handing_over(world, 1)
    broken(world, 1)
    world.feed(ev.ClientLeft(1))
    assert handing_over(world, 2) is None
    assert world.request_state(2) is RequestState.MIGRATING
    world.after(ms=59_999)
    assert not world.commanded(ImportKv)
    world.after(ms=1)
    assert [c.request_id for c in world.commanded(ImportKv)] == [2]
    world.imported(2)
    only(world.ended(2), ev.RequestFinished)
    assert not world.state.links


def test_new_prompts_go_where_the_links_are_good() -> None:
    world = serving("prefill", "prefill", "decode", link_cooldown_ms=60_000)
    handing_over(world, 1)
    broken(world, 1)
    world.feed(ev.ClientLeft(1))
    world.arrive(2)
    world.arrive(3)
    assert [world.state.requests[i].source for i in (2, 3)] == ["r1", "r1"]


@pytest.mark.parametrize("victim", ["r0", "r1"])
def test_a_new_life_of_either_end_starts_afresh(victim: str) -> None:
    """B.2 #42, #46: what is known is known of a life, not of a name."""
    world = serving("prefill", "decode", link_cooldown_ms=60_000)
    handing_over(world, 1)
    broken(world, 1)
    world.feed(ev.ClientLeft(1))
    assert links(world) == {"r0>r1": (1, True)}
    world.feed(ev.WorkerExited(victim, 1, "killed"))
    assert world.state.links == {}
    world.attach(victim)
    world.load(victim)
    assert handing_over(world, 2).target == "r1"


def test_replicas_that_do_not_fit_are_not_tried_again_for_the_longest_time() -> None:
    """B.2 #32: a mismatch is known at the handshake, and the client hears of it at once."""
    world = Harness(link_cooldown_ms=100, link_cooldown_max_ms=60_000, max_resumes=1)
    world.serving("prefill", "decode")
    world.after(ms=1)
    world.feed(ev.RequestArrived(1, 100, 64, 7, 0, resumable=0))
    world.first_token(1)
    world.sent[1] = 1
    events = broken(world, 1, "mismatch")
    assert only(events, ev.LinkCooled).until_ns == world.now + 60_000 * MS
    failed = only(events, ev.RequestFailed)
    assert failed.code == "handover_failed"


def test_state_and_plan_show_the_link() -> None:
    world = serving("prefill", "decode", "decode")
    handing_over(world, 1)
    broken(world, 1)
    [using] = world.state.to_json()["links"]
    assert (using["target"], len(using["leases"])) == ("r2", 1)
    [cooling] = world.state.to_json()["faulty_links"]
    assert (cooling["target"], cooling["fault"], cooling["reason"]) == (
        "r1",
        "stalled",
        "no byte came",
    )
    started = [r for r in world.log if isinstance(r.payload, ev.MigrationStarted)][-1]
    explainer = Explainer(started.seq, ClusterState())
    for record in world.log:
        explainer.see(record)
    found = explainer.finish()
    assert found is not None
    refusals = {c.replica: c.refusal for c in found.candidates}
    assert refusals["r1"] == "it could not take up the KV of this attempt"
    handing_over(world, 2)
    started = [r for r in world.log if isinstance(r.payload, ev.MigrationStarted)][-1]
    explainer = Explainer(started.seq, ClusterState())
    for record in world.log:
        explainer.see(record)
    found = explainer.finish()
    assert found is not None
    refusals = {c.replica: c.refusal for c in found.candidates}
    assert refusals["r1"] == "its link from r0 cools down after 1 faults: no byte came"


def test_a_snapshot_keeps_the_links() -> None:
    world = serving("prefill", "decode", link_cooldown_ms=60_000)
    handing_over(world, 1)
    broken(world, 1)
    again = ClusterState.decode(world.state.encode())
    assert again.links == world.state.links
    assert again.hash() == world.state.hash()
    assert not [c for c in world.commands if isinstance(c, StartPrefill)]
