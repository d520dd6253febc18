"""Requests that decode on a replica that shuts go on elsewhere with their KV, or stay."""

from blitzd.control.commands import DecodeLocally, HoldDecode, ImportKv, ReleaseKv
from blitzd.events import types as ev
from tests.control.harness import Harness, ReplicaState, RequestState, only


def decoding(*roles: str, requests: int = 1, **policy: int) -> Harness:
    world = Harness(**policy).serving(*(roles or ("prefill", "decode", "decode")))
    world.after(ms=1)
    for request_id in range(1, requests + 1):
        world.arrive(request_id, max_tokens=200)
        world.first_token(request_id)
        world.imported(request_id)
        world.sent[request_id] = 2
    return world


def steps(world: Harness) -> list[str]:
    return [r.payload.step for r in world.log if isinstance(r.payload, ev.RequestMoving)]


def test_a_drained_decode_replica_hands_its_requests_on_and_is_empty() -> None:
    world = decoding()
    first = world.state.requests[1].target
    other = {"r1": "r2", "r2": "r1"}[first]
    world.feed(ev.DrainRequested(first, 0))
    assert world.commanded(HoldDecode) == [HoldDecode(first, 1, 1)]
    assert world.request_state(1) is RequestState.DECODING, "until its next token"
    world.feed(ev.DecodeHeld(first, 1, 1))
    [call] = world.commanded(ImportKv)
    assert (call.source, call.target) == (first, other)
    assert world.state.blocks_reserved(first) > 0
    events = world.imported(1)
    assert world.commanded(ReleaseKv) == [ReleaseKv(first, 1, 1)]
    assert only(events, ev.ReplicaEmptied).replica == first
    assert world.request_state(1) is RequestState.DECODING
    assert (world.state.requests[1].target, world.state.requests[1].moving) == (other, "")
    assert steps(world) == ["asked", "held"]
    only(world.ended(1), ev.RequestFinished)


def test_one_that_is_nearly_done_or_has_nowhere_to_go_finishes_where_it_is() -> None:
    world = decoding(move_min_tokens=64)
    world.sent[1] = 136
    world.feed(ev.DrainRequested(world.state.requests[1].target, 0))
    assert not world.commanded(HoldDecode)
    world = decoding("prefill", "decode")
    world.feed(ev.DrainRequested("r1", 0))
    assert not world.commanded(HoldDecode)
    world = decoding(move_min_tokens=0)
    world.feed(ev.DrainRequested(world.state.requests[1].target, 0))
    assert not world.commanded(HoldDecode)


def test_a_few_at_a_time() -> None:
    world = decoding("prefill", "decode", requests=4, max_imports_per_replica=2)
    world.feed(ev.RoleRequested("r0", "prefill"))
    assert {world.state.requests[i].target for i in range(1, 5)} == {"r1"}
    world = decoding(requests=8, max_imports_per_replica=2)
    here = [r.id for r in world.state.requests_on("r1")]
    assert len(here) == 4
    world.feed(ev.DrainRequested("r1", 0))
    assert [c.request_id for c in world.commanded(HoldDecode)] == here[:2]
    world.feed(ev.DecodeHeld("r1", 1, here[0]))
    assert not world.commanded(HoldDecode)
    world.imported(here[0])
    assert [c.request_id for c in world.commanded(HoldDecode)] == [here[2]]


def test_without_a_lease_it_goes_on_where_it_was_and_is_not_asked_again() -> None:
    world = decoding()
    first = world.state.requests[1].target
    other = {"r1": "r2", "r2": "r1"}[first]
    world.feed(ev.DrainRequested(first, 0))
    world.feed(ev.WorkerExited(other, 1, "killed"))
    world.feed(ev.DecodeHeld(first, 1, 1))
    assert world.commanded(DecodeLocally) == [DecodeLocally(first, 1, 1)]
    assert world.request_state(1) is RequestState.DECODING
    world.attach(other)
    world.load(other)
    assert not world.commanded(HoldDecode)
    assert steps(world) == ["asked", "held", "stays"]
    only(world.ended(1), ev.RequestFinished)


def test_a_hand_over_that_fails_costs_nothing_but_the_try() -> None:
    world = decoding()
    first = world.state.requests[1].target
    world.feed(ev.DrainRequested(first, 0))
    world.feed(ev.DecodeHeld(first, 1, 1))
    lease = world.state.requests[1].lease_id
    world.feed(ev.ImportEnded(lease, 0, 0, "stalled", "no byte came"))
    assert world.commanded(DecodeLocally) == [DecodeLocally(first, 1, 1)]
    assert world.state.requests[1].resumes == 0
    assert world.replica(first).state is ReplicaState.SHUTTING_DECODE


def test_an_undrain_in_between_is_no_harm() -> None:
    world = decoding()
    first = world.state.requests[1].target
    world.feed(ev.DrainRequested(first, 0))
    world.feed(ev.UndrainRequested(first))
    world.feed(ev.DecodeHeld(first, 1, 1))
    [call] = world.commanded(ImportKv)
    assert call.target != first
    world.imported(1)
    only(world.ended(1), ev.RequestFinished)


def test_its_end_or_its_clients_leaving_may_come_first() -> None:
    world = decoding()
    first = world.state.requests[1].target
    world.feed(ev.DrainRequested(first, 0))
    only(world.ended(1), ev.RequestFinished)
    [late] = world.feed(ev.DecodeHeld(first, 1, 1))
    assert isinstance(late, ev.StaleNoticeIgnored)
    world = decoding()
    world.feed(ev.DrainRequested(first, 0))
    only(world.feed(ev.ClientLeft(1)), ev.RequestCancelled)
    [late] = world.feed(ev.DecodeHeld(first, 1, 1))
    assert isinstance(late, ev.StaleNoticeIgnored)


def test_one_that_was_lost_while_it_moved_does_not_stay_where_it_is_prefilled_anew() -> None:
    """What was decided of its move was of the attempt that is over."""
    world = decoding()
    first = world.state.requests[1].target
    other = {"r1": "r2", "r2": "r1"}[first]
    world.feed(ev.DrainRequested(first, 0))
    world.feed(ev.DecodeHeld(first, 1, 1))
    world.feed(ev.WorkerExited(first, 1, "killed"))
    world.feed(ev.WorkerExited(other, 1, "killed"))
    assert world.state.requests[1].source == "r0"
    world.sent[1] = 3
    world.first_token(1)
    assert not world.commanded(DecodeLocally)
    assert world.request_state(1) is RequestState.MIGRATING
    world.attach(other)
    world.load(other)
    assert [call.target for call in world.commanded(ImportKv)] == [other]
