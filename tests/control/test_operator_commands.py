"""What operators ask for: drains, scaling by name, breaking off loads, the policy."""

import pytest

from blitzd.control.commands import EndWorker
from blitzd.control.policy import Policy
from blitzd.events import types as ev
from tests.control.harness import MS, Harness, ReplicaState, only


def decoding(*roles: str, requests: int = 1, **policy: int) -> Harness:
    world = Harness(**policy).serving(*roles)
    for request_id in range(1, requests + 1):
        world.arrive(request_id)
        world.first_token(request_id)
        world.imported(request_id)
    return world


# Drains.


def test_a_drain_without_a_deadline_has_the_policys() -> None:
    world = decoding("prefill", "decode", "decode", drain_ms=7000)
    started = only(world.feed(ev.DrainRequested("r1", 0)), ev.ShutdownStarted)
    assert started.deadline_ns == world.now + 7000 * MS


def test_drains_before_a_deletion_are_repeatable() -> None:
    """B.1 #7: operators ask for drain before deletion; drain and undrain are idempotent."""
    world = decoding("prefill", "decode", "decode")
    deadline_ns = world.now + 1000 * MS
    world.feed(ev.DrainRequested("r1", deadline_ns))
    assert world.feed(ev.DrainRequested("r1", deadline_ns)) == []
    assert world.feed(ev.DrainRequested("r1", 0)) == []
    assert world.feed(ev.DrainRequested("r1", deadline_ns + MS)) == [], "never later"
    world.ended(1)
    world.after(ms=30_000)
    assert world.replica("r1").state is ReplicaState.INACTIVE
    assert world.feed(ev.DrainRequested("r1", 0)) == [], "drained it stays"
    world.feed(ev.UndrainRequested("r1"))
    assert world.feed(ev.UndrainRequested("r1")) == []


def test_a_second_drain_may_bring_the_deadline_forward() -> None:
    world = decoding("prefill", "decode", "decode")
    world.feed(ev.DrainRequested("r1", world.now + 10_000 * MS))
    sooner = world.now + 10 * MS
    assert only(world.feed(ev.DrainRequested("r1", sooner)), ev.ReplicaCordoned)
    assert world.replica("r1").drain_deadline_ns == sooner


def test_a_drain_of_one_that_a_plan_shuts_keeps_the_plan_from_bringing_it_back() -> None:
    world = decoding("prefill", "decode", "decode", requests=2)
    world.feed(ev.ScaleRequested(1, 1))
    [shutting] = [r for r in world.state.replicas.values() if r.state.startswith("Shutting")]
    only(world.feed(ev.DrainRequested(shutting.id, 0)), ev.ReplicaCordoned)
    world.feed(ev.ScaleRequested(1, 2))
    assert shutting.state is ReplicaState.SHUTTING_DECODE


@pytest.mark.parametrize("state", ["loading", "failed", "null"])
def test_what_serves_nothing_yet_can_be_drained(state: str) -> None:
    world = Harness().serving("prefill", "decode", "spare")
    if state == "failed":
        world.feed(ev.WorkerExited("r1", 1, "killed"))
        victim = world.replica("r1")
    else:
        world.feed(ev.RoleRequested("r2", "decode"))
        victim = world.replica("r2")
        if state == "null":
            world.load("r2")
            world.feed(ev.RoleRequested("r2", "spare"))
    only(world.feed(ev.DrainRequested(victim.id, 0)), ev.ReplicaCordoned)
    if state == "loading":
        assert world.commands == [EndWorker("r2", 1, report=True)]
    assert world.feed(ev.DrainRequested(victim.id, 0)) == []
    world.feed(ev.ScaleRequested(1, 2))
    assert victim.role == "spare"
    world.feed(ev.UndrainRequested(victim.id))
    assert victim.role == "decode"


def test_a_colocated_replica_that_is_brought_back_does_both_again() -> None:
    world = Harness().serving("colocated", "colocated")
    world.arrive(1)
    busy = world.state.requests[1].source
    world.feed(ev.DrainRequested(busy, 0))
    assert world.replica(busy).state is ReplicaState.SHUTTING_DECODE
    world.feed(ev.UndrainRequested(busy))
    assert world.replica(busy).state is ReplicaState.COLOCATED


def test_the_others_do_not_notice_a_drain() -> None:
    """B.1 #2: scaling down one worker shut the whole deployment."""
    world = decoding("prefill", "decode", "decode", "decode", requests=3)
    before = {r.id: (r.state, r.epoch, r.pid) for r in world.state.replicas.values()}
    world.feed(ev.DrainRequested("r1", 0))
    after = {r.id: (r.state, r.epoch, r.pid) for r in world.state.replicas.values()}
    assert {r for r in after if after[r] != before[r]} == {"r1"}


def test_hand_over_works_while_both_sides_drain() -> None:
    """B.1 #5: decode could not call prefill while draining."""
    world = Harness().serving("prefill", "prefill", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    request = world.state.requests[1]
    world.feed(ev.DrainRequested(request.source, 0))
    world.feed(ev.DrainRequested(request.target, 0))
    world.imported(1)
    only(world.ended(1), ev.RequestFinished)


# Scaling down.


def test_the_load_of_a_scale_down_causes_no_scale_up() -> None:
    """B.1 #6: hold until the drain ends, and what the rest then carries is no reason to scale
    up at once."""
    world = decoding("prefill", "decode", "decode", "decode", requests=6)
    events = world.feed(ev.ScaleRequested(1, 1))
    assert sum(isinstance(e, ev.ShutdownStarted) for e in events) == 2
    for request_id in range(7, 12):
        world.arrive(request_id)
        world.first_token(request_id)
        world.imported(request_id)
    for _ in range(20):
        ups = [e for e in world.after(ms=1000) if isinstance(e, ev.ReplicaRevived | ev.NullReused)]
        assert not ups


def test_a_request_that_arrives_between_decision_and_drain_goes_elsewhere() -> None:
    """B.1 #16: an averaging window hid requests that had arrived meanwhile."""
    world = Harness().serving("prefill", "prefill", "decode")
    [down] = [e for e in world.feed(ev.ScaleRequested(1, 1)) if isinstance(e, ev.ShutdownStarted)]
    world.arrive(1)
    assert world.state.requests[1].source != down.replica


def test_pending_ones_go_before_idle_ones_and_those_before_busy_ones() -> None:
    """B.1 #14: a scale-down killed RUNNING instead of STARTING ones."""
    world = decoding("prefill", "decode", "decode", "spare", "spare")
    busy = world.state.requests[1].target
    [idle] = {"r1", "r2"} - {busy}
    world.feed(ev.ScaleRequested(1, 4))
    world.feed(ev.LoadMoved("r3", 1, 20, 30, 20, 30))
    world.feed(ev.LoadMoved("r4", 1, 5, 30, 5, 30))
    victims = []
    for count in (3, 2, 1):
        before = {r.id for r in world.state.replicas.values() if r.role == "decode"}
        world.feed(ev.ScaleRequested(1, count))
        after = {r.id for r in world.state.replicas.values() if r.role == "decode"}
        victims += sorted(before - after)
    assert victims == ["r4", "r3", idle], "of those that load, the one that has least"
    assert world.replica("r4").worker == "stopping", "a load is broken off with its worker"


def test_none_with_work_goes_while_an_idle_one_is_there() -> None:
    """B.1 #17: it kept an idle instance and killed the one with the 10-minute request."""
    world = decoding("prefill", "decode", "decode", "decode", requests=2)
    busy = {r.target for r in world.state.requests.values()}
    world.feed(ev.ScaleRequested(1, 2))
    assert all(world.replica(replica_id).role == "decode" for replica_id in busy)


def test_an_operator_chooses_who_goes() -> None:
    """B.1 #15: choice of the victim."""
    world = decoding("prefill", "decode", "decode")
    busy = world.state.requests[1].target
    events = world.feed(ev.RemoveRequested(busy))
    assert only(events, ev.ScaleSet) == ev.ScaleSet(1, 1)
    assert only(events, ev.ShutdownStarted).replica == busy
    assert world.feed(ev.RemoveRequested(busy)) == []
    world.ended(1)
    assert world.replica(busy).state is ReplicaState.SHUTTING_NULL
    refused = only(world.feed(ev.RemoveRequested("r0")), ev.CommandRefused)
    assert refused.reason == "no other prefill replica serves"


def test_a_load_for_another_role_begins_with_a_new_worker() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.RoleRequested("r2", "decode"))
    world.feed(ev.RoleRequested("r2", "prefill"))
    world.feed(ev.LoadEnded("r2", 1, "d", "map", 30, 1000, 64, 64))
    world.feed(ev.WorkerExited("r2", 1, "exited with status 0"))
    world.attach("r2")
    world.load("r2")
    assert world.replica("r2").state is ReplicaState.PREFILL


@pytest.mark.parametrize(
    ("victim", "role", "counts"),
    [("r1", "decode", (1, 2)), ("r1", "spare", (1, 1)), ("r3", "prefill", (3, 1))],
)
def test_wanted_counts_follow_a_role_that_is_changed_by_hand(
    victim: str, role: str, counts: tuple[int, int]
) -> None:
    """Scaling would undo it else, in the same turn."""
    world = Harness().serving("prefill", "prefill", "decode", "spare", "spare")
    world.feed(ev.ScaleRequested(2, 1))
    world.feed(ev.RoleRequested(victim, role))
    node = world.state.node
    assert (node.wanted_prefill, node.wanted_decode) == counts
    assert world.replica(victim).role == role
    world.after(1000)
    assert world.replica(victim).role == role


# The policy.


def test_a_change_of_policy_says_what_was_and_holds_from_the_next_decision_on() -> None:
    world = Harness(null_ttl_ms=30_000).serving("prefill", "prefill", "decode")
    changed = only(world.feed(ev.PolicyRequested((("null_ttl_ms", 50),))), ev.PolicyChanged)
    assert changed.changes == (("null_ttl_ms", 30_000, 50),)
    assert world.feed(ev.PolicyRequested((("null_ttl_ms", 50),))) == []
    world.feed(ev.DrainRequested("r0", 0))
    only(world.after(ms=50), ev.ReplicaDeactivated)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("null_ttl_ms", 0, "null_ttl_ms is 0; accepted: an integer from 1 to 86400000"),
        ("mutate_after_load", 2, "mutate_after_load is 2; accepted: an integer from 0 to 1"),
        ("pair_cup", 2, "no such value; there are "),
    ],
)
def test_a_value_out_of_its_bounds_changes_nothing(name: str, value: int, reason: str) -> None:
    world = Harness().serving("prefill", "decode")
    before = world.state.hash()
    wanted = (("max_queued_requests", 1), (name, value))
    refused = only(world.feed(ev.PolicyRequested(wanted)), ev.CommandRefused)
    assert refused.reason.startswith(reason)
    assert (refused.code, refused.field) == ("invalid", name)
    assert world.state.hash() == before


def test_every_value_of_the_policy_has_bounds_that_its_default_keeps() -> None:
    defaults = dict(Policy().pairs())
    bounds = Policy.bounds()
    assert set(bounds) == set(defaults)
    assert all(low <= defaults[name] <= high for name, (low, high) in bounds.items())
