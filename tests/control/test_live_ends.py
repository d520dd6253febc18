"""However a live pair ends, nothing that was accepted is lost or held for ever, and who is left
of the two is an ordinary replica."""

import pytest

from blitzd.control.commands import CancelRequest, FollowLive
from blitzd.control.core import CORE_VERSION
from blitzd.control.pairs import FOLLOW_TRIES
from blitzd.events import types as ev
from tests.control.harness import Harness, ReplicaState, RequestState, only, refold
from tests.control.test_live_dispatch import paired

S = ReplicaState
PREFILLING, RELAYED = RequestState.PREFILLING, RequestState.RELAYED


def served(world: Harness, request_id: int) -> None:
    """The request is computed wherever it is now, and ends."""
    world.after(1000)
    world.first_token(request_id)
    world.imported(request_id)
    only(world.ended(request_id), ev.RequestFinished)
    assert refold(world.log).hash() == world.state.hash()


@pytest.fixture
def world() -> Harness:
    """Request 1 is pending on New, 2 was relayed half-way, 3 with no layer done."""
    world = paired("spare")
    for request_id in (1, 2, 3):
        world.arrive(request_id)
    world.relayed(2, 7)
    world.relayed(3, 0)
    return world


def test_new_dies(world: Harness) -> None:
    events = world.feed(ev.WorkerExited("r2", 1, "killed"))
    resumed = [e.request_id for e in events if isinstance(e, ev.RequestResumed)]
    assert resumed == [1, 2]
    assert ("r0", 1) in [(c.replica, c.request_id) for c in world.commanded(CancelRequest)]
    assert world.replica("r0").state is S.PREFILL
    assert world.request_state(3) is RELAYED, "it is Old's alone"
    for request_id in (3, 1, 2):
        served(world, request_id)


def test_old_dies(world: Harness) -> None:
    """What New has ends there as its layers come."""
    events = world.feed(ev.WorkerExited("r0", 1, "killed"))
    resumed = [e.request_id for e in events if isinstance(e, ev.RequestResumed)]
    assert resumed == [2, 3]
    assert world.request_state(1) is PREFILLING
    assert (world.state.requests[1].source, world.state.requests[1].rest) == ("r2", "")
    assert world.request_state(2) is RequestState.QUEUED, "New alone takes no more"
    only(world.load("r2"), ev.PrefillOpened)
    world.first_token(1)
    world.imported(1)
    world.ended(1)
    for request_id in (2, 3):
        served(world, request_id)


def test_old_dies_with_what_new_had_just_given_it() -> None:
    """The word of it comes after the death."""
    world = paired("prefill")
    world.arrive(1)
    assert world.state.requests[1].source == "r2"
    world.feed(ev.WorkerExited("r0", 1, "killed"))
    resumed = only(world.feed(ev.Relayed("r2", 1, 1, 0, 7)), ev.RequestResumed)
    assert resumed.cause == "worker_lost"
    served(world, 1)


def test_the_load_fails(world: Harness) -> None:
    failed = ev.LoadEnded("r2", 1, "", "r1", 30, 0, 64, 0, "digest differs")
    kinds = [type(event) for event in world.feed(failed)]
    assert kinds.index(ev.PairBroken) < kinds.index(ev.LoadFailed)
    assert world.replica("r0").state is S.PREFILL
    for request_id in (3, 1, 2):
        served(world, request_id)


@pytest.mark.parametrize("relayed", [False, True])
def test_the_target_dies(relayed: bool) -> None:
    world = paired("decode")
    world.arrive(1)
    if relayed:
        world.relayed(1, 7)
    world.first_token(1)
    first = world.state.requests[1].target
    world.sent[1] = 1
    world.feed(ev.WorkerExited(first, 1, "killed"))
    world.after(1)
    request = world.state.requests[1]
    assert (request.target, request.resumes) == ({"r1": "r3", "r3": "r1"}[first], 0)
    world.imported(1)
    only(world.ended(1), ev.RequestFinished)


@pytest.mark.parametrize("dead", ["r0", "r2"])
def test_half_of_the_kv_dies_on_its_way(dead: str) -> None:
    world = paired()
    world.arrive(1)
    world.relayed(1, 7)
    world.first_token(1)
    world.sent[1] = 1
    resumed = only(world.feed(ev.WorkerExited(dead, 1, "killed")), ev.RequestResumed)
    assert resumed.output_tokens == 1
    assert world.state.leases == {}
    assert {c.replica for c in world.commanded(CancelRequest)} == {"r0", "r1", "r2"}


def test_old_is_told_again_and_then_the_pair_breaks() -> None:
    world = paired("spare")
    world.arrive(1)
    world.feed(ev.RequestArrived(2, 100, 64, 7, 0, 0))  # may not be computed again
    for _ in range(FOLLOW_TRIES - 1):
        only(world.followed(1, "source"), ev.FollowStopped)
        assert world.commanded(FollowLive) == [], "after a while"
        world.after(1000)
        assert len(world.commanded(FollowLive)) == 1
    events = world.followed(1, "source")
    assert "could not follow" in only(events, ev.PairBroken).reason
    assert only(events, ev.RequestResumed).request_id == 1
    assert world.replica("r0").state is S.PREFILL
    assert world.request_state(2) is PREFILLING, "it ends with New's last layer"
    world.after(1000)
    assert world.state.requests[1].source == "r0"
    world.load("r2")
    assert world.replica("r2").state is S.PREFILL
    served(world, 2)
    served(world, 1)


def test_old_that_cannot_follow_a_whole_new_lets_it_go() -> None:
    world = paired()
    world.arrive(1)
    for _ in range(FOLLOW_TRIES):
        world.load("r2")
        world.after(1000)
        world.followed(1, "source")
    assert {world.replica(r).state for r in ("r0", "r2")} == {S.PREFILL}
    assert world.request_state(1) is PREFILLING, "New has all layers for it"
    served(world, 1)


def test_an_acknowledgement_that_old_did_not_get() -> None:
    """New has given the request away and Old has let go of it: nobody runs it."""
    world = paired(audit_grace_ms=1000)
    for request_id in (1, 2):
        world.arrive(request_id)
        world.relayed(request_id, 7)
    held = ev.HoldingsReported("r0", 1, 2, ((2, 0),), (), 0, 0, ())
    world.now += 999_999_999
    assert world.feed(held) == [], "it may be about to come"
    world.now += 1
    resumed = only(world.feed(held), ev.RequestResumed)
    assert (resumed.request_id, resumed.cause) == (1, "handover_failed")
    assert {c.replica for c in world.commanded(CancelRequest)} == {"r0", "r2"}
    assert world.request_state(2) is RELAYED


def test_words_about_a_settled_pair_still_count() -> None:
    """Old's word that New is drained may come before New's that it gave a request away."""
    world = paired()
    world.arrive(1)
    world.load("r2")
    only(world.followed(1), ev.PairSettled)
    only(world.relayed(1, 7, by="r2"), ev.RequestRelayed)
    served(world, 1)


@pytest.mark.parametrize(
    "command",
    [
        lambda r: ev.DrainRequested(r, 0),
        lambda r: ev.RoleRequested(r, "decode"),
        lambda r: ev.RestartRequested(r, 0),
    ],
)
@pytest.mark.parametrize("side", ["r0", "r2"])
def test_no_command_takes_one_side_away(command: object, side: str) -> None:
    world = paired()
    assert callable(command)
    refused = only(world.feed(command(side)), ev.CommandRefused)
    assert "half of a live pair, until that settles" in refused.reason


def test_counts_follow_a_spare_that_an_operator_has_go_live() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.ScaleRequested(1, 1))
    only(world.feed(ev.LivePairRequested("r2", "r0")), ev.ScaleSet)
    world.load("r2")
    world.after(1)
    assert len(world.state.in_states(S.PREFILL)) == 2


def test_who_is_to_decode_does_not_go_live() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.RoleRequested("r2", "decode"))
    for _ in range(2):
        world.feed(ev.LoadEnded("r2", 1, "", "map", 30, 0, 64, 0, "digest differs"))
    assert world.replica("r2").state is S.INACTIVE
    refused = only(world.feed(ev.LivePairRequested("r2", "r0")), ev.CommandRefused)
    assert refused.reason == "it is to be decode; a spare or a prefill replica can go live"


def test_counts_do_not_take_a_side_away() -> None:
    world = paired()
    events = world.feed(ev.ScaleRequested(1, 1))
    assert [type(e) for e in events] == [ev.ScaleSet]
    world.load("r2")
    world.after(1)
    prefills = world.state.in_states(S.PREFILL)
    assert len(prefills) == 1, "once it has settled one is too many"


@pytest.mark.parametrize("both", [False, True])
def test_a_daemon_that_comes_back_breaks_the_pair_and_keeps_who_is_whole(both: bool) -> None:
    world = paired()
    world.arrive(1)
    if both:
        world.load("r2")
    roles = (("r0", "prefill"), ("r1", "decode"), ("r2", "spare"))
    adopted = (("r0", 1, 100), ("r1", 1, 101), *((("r2", 1, 102),) if both else ()))
    policy = world.policy.pairs()
    world.feed(ev.Booted(2, "test", "local", roles, policy, CORE_VERSION, adopted))
    assert world.state.pairs == {}
    assert world.replica("r0").state is S.PREFILL
    assert world.replica("r2").state is (S.PREFILL if both else S.FAILED)
    assert not world.state.requests


def test_half_of_the_kv_on_one_that_becomes_the_only_decode() -> None:
    world = paired()
    world.arrive(1)
    world.relayed(1, 7)
    world.load("r2")
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    world.first_token(1)
    world.sent[1] = 1
    events = world.feed(ev.RoleRequested("r0", "decode"))
    only(events, ev.RequestResumed)
    only(events, ev.MutationFinished)
    served(world, 1)


def test_new_serves_as_soon_as_nothing_is_left_to_take_however_busy_old_is() -> None:
    """Old asks for more when it is idle; under load it is not, and would never hear that New has
    nothing."""
    world = paired()
    world.arrive(1)
    world.load("r2")
    assert world.replica("r2").state is S.REFACTORY_PREFILL
    world.arrive(2)
    assert world.state.requests[2].source == "r0"
    only(world.first_token(1), ev.PairSettled)
    assert {world.replica(name).state for name in ("r0", "r2")} == {S.PREFILL}
    world.arrive(3)
    assert (world.state.requests[3].source, world.state.requests[3].rest) == ("r2", "")
    [late] = world.feed(ev.FollowEnded(1, "r0", 1, 0))
    assert isinstance(late, ev.StaleNoticeIgnored)
    assert refold(world.log).hash() == world.state.hash()
