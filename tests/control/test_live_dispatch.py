"""Prompts for a replica that serves while it loads, and what its pair takes over."""

import pytest

from blitzd.control.commands import (
    CancelRequest,
    FollowLive,
    ImportKv,
    LoadModel,
    ReleaseKv,
    StartPrefill,
)
from blitzd.events import types as ev
from blitzd.fsm.entities import Pair
from blitzd.sched.zigzag import pending_cap
from tests.control.harness import BLOCKS, MS, Harness, ReplicaState, RequestState, only, refold

S = ReplicaState


def paired(*others: str, **policy: int) -> Harness:
    """r0 is Old of r2, which has said that it takes prompts."""
    world = Harness(**policy).serving("prefill", "decode", "spare", *others)
    world.feed(ev.LivePairRequested("r2", "r0"))
    world.moved("r2")
    return world


def test_the_first_word_of_the_load_opens_the_door_and_has_old_follow() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))
    [load] = world.commanded(LoadModel)
    assert load.live
    assert load.peers
    world.arrive(1)
    assert world.state.requests[1].source == "r0", "until then Old takes prompts"
    events = world.moved("r2")
    assert world.commanded(FollowLive) == [FollowLive(1, "r0", 1, "r2", 1)]
    only(events, ev.FollowStarted)
    assert world.moved("r2", 2) != []
    assert world.commanded(FollowLive) == [], "once"
    world.arrive(2)
    request = world.state.requests[2]
    assert (request.source, request.rest) == ("r2", "r0")
    assert world.commanded(StartPrefill) == [StartPrefill("r2", 1, 2, True)]
    assert refold(world.log).hash() == world.state.hash()


def test_blocks_are_held_on_both_until_one_of_them_has_no_part() -> None:
    world = paired()
    for request_id in (1, 2, 3):
        world.arrive(request_id, prompt=100)

    def reserved() -> tuple[int, int]:
        return world.state.blocks_reserved("r2"), world.state.blocks_reserved("r0")

    assert reserved() == (6, 6)
    world.relayed(1, 0)
    assert reserved() == (4, 6), "no layer ran on New"
    world.relayed(2, 5)
    assert reserved() == (4, 6), "a half each"
    world.first_token(3)
    assert reserved() == (4, 4), "all of it on New"
    world.first_token(2)
    world.imported(2)
    assert reserved() == (2, 2)
    for request_id in (1, 2, 3):
        world.feed(ev.ClientLeft(request_id))
    assert reserved() == (0, 0)


def test_the_cap_is_that_of_the_rule_which_the_model_runs_by() -> None:
    pair = Pair(1, "n", 1, "o", 1, 4, 10 * MS)
    for ms in (0, 199, 200, 399, 400, 1000, 60_000):
        assert pair.cap_at((10 + ms) * MS) == pending_cap(ms * MS)
    assert Pair(1, "n", 1, "o", 1, 1, 0).cap_at(60_000 * MS) == 1


def test_what_is_above_the_cap_waits_and_old_is_not_given_it() -> None:
    world = paired()
    for request_id in range(1, 7):
        world.arrive(request_id)
    assert [world.state.requests[i].source for i in range(1, 7)] == ["r2"] * 4 + ["", ""]
    world.relayed(1, 2)
    assert world.state.requests[5].source == "r2", "a relayed one is not pending any more"
    world.after(400)
    world.relayed(2, 2)
    world.relayed(3, 2)
    assert world.state.requests[6].source == "", "the cap is 2 by now"
    world.relayed(4, 2)
    assert world.state.requests[6].source == "r2"


def test_until_new_takes_prompts_old_is_given_no_more_than_new_would_be() -> None:
    """It follows when it has run them."""
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))
    for request_id in range(1, 7):
        world.arrive(request_id)
    assert [world.state.requests[i].source for i in range(1, 7)] == ["r0"] * 4 + ["", ""]
    world.moved("r2")
    assert [world.state.requests[i].source for i in (5, 6)] == ["r2", "r2"]


def test_another_prefill_takes_prompts_as_ever() -> None:
    world = Harness().serving("prefill", "decode", "spare", "prefill")
    world.feed(ev.LivePairRequested("r2", "r0"))
    world.moved("r2")
    for request_id in range(1, 5):
        world.arrive(request_id)
    assert sorted(r.source for r in world.state.requests.values()) == ["r2", "r2", "r3", "r3"]


def test_old_without_room_for_its_half_lets_new_take_no_more() -> None:
    world = Harness().serving("prefill", "decode", "spare", blocks=4)
    world.feed(ev.LivePairRequested("r2", "r0"))
    world.moved("r2", blocks=BLOCKS)
    for request_id in (1, 2, 3):
        world.arrive(request_id, prompt=100)
    assert [world.state.requests[i].source for i in (1, 2, 3)] == ["r2", "r2", ""]


def test_what_new_refuses_goes_to_old_whole_and_fails_only_there() -> None:
    world = paired()
    world.feed(ev.RequestArrived(1, 100, 64, 7, 0, 0))  # may not be computed again
    returned = only(
        world.feed(ev.RequestErrored("r2", 1, 1, "prompt_tokens: 9000 tokens")), ev.RequestReturned
    )
    assert returned.replica == "r2"
    request = world.state.requests[1]
    assert (request.source, request.rest, request.resumes) == ("r0", "", 0)
    assert world.commanded(StartPrefill) == [StartPrefill("r0", 1, 1, True)]
    assert world.replica("r2").failures == 0
    only(world.feed(ev.RequestErrored("r0", 1, 1, "no such token")), ev.RequestFailed)


@pytest.mark.parametrize("first", ["r2", "r0"])
def test_either_may_say_first_that_a_request_is_relayed(first: str) -> None:
    world = paired()
    world.arrive(1)
    relayed = only(world.relayed(1, 7, by=first), ev.RequestRelayed)
    assert (relayed.request_id, relayed.layers) == (1, 7)
    assert world.request_state(1) is RequestState.RELAYED
    other = "r0" if first == "r2" else "r2"
    assert world.relayed(1, 7, by=other) == []
    world.first_token(1)
    assert world.relayed(1, 7, by=other) == []


def test_a_relayed_one_has_one_lease_with_two_parts() -> None:
    world = paired()
    world.arrive(1)
    world.relayed(1, 7)
    started = only(world.first_token(1), ev.MigrationStarted)
    assert (started.source, started.rest, started.split_layer) == ("r2", "r0", 7)
    [pull] = world.commanded(ImportKv)
    assert (pull.source, pull.rest, pull.rest_epoch, pull.split_layer) == ("r2", "r0", 1, 7)
    world.imported(1)
    assert world.commanded(ReleaseKv) == [ReleaseKv("r2", 1, 1), ReleaseKv("r0", 1, 1)]
    assert world.request_state(1) is RequestState.DECODING
    assert refold(world.log).hash() == world.state.hash()


def test_one_that_old_took_whole_is_like_any_other_of_olds() -> None:
    world = paired()
    world.arrive(1)
    assert [type(e) for e in world.relayed(1, 0, by="r0")] == [ev.RequestRelayed]
    events = world.feed(ev.FirstTokenProduced("r0", 1, 1))
    assert type(events[0]) is ev.PrefillFinished
    [pull] = world.commanded(ImportKv)
    assert (pull.source, pull.rest) == ("r0", "")
    assert [type(e) for e in world.relayed(1, 0, by="r2")] == [ev.StaleNoticeIgnored]


def test_new_finishes_by_itself_what_old_did_not_take() -> None:
    world = paired()
    world.arrive(1)
    world.first_token(1)
    [pull] = world.commanded(ImportKv)
    assert (pull.source, pull.rest) == ("r2", "")


@pytest.mark.parametrize(("layers", "freed"), [(7, {"r2"}), (0, set())])
def test_a_request_may_end_on_old_with_its_first_token(layers: int, freed: set[str]) -> None:
    world = paired()
    world.arrive(1, max_tokens=1)
    world.relayed(1, layers)
    only(world.feed(ev.GenerationEnded("r0", 1, 1, "length", 1, "00")), ev.RequestFinished)
    assert {c.replica for c in world.commanded(CancelRequest)} == freed


@pytest.mark.parametrize("relayed", [False, True])
def test_a_client_that_leaves_frees_both(relayed: bool) -> None:
    """Old may have taken it over before New's word of that is read."""
    world = paired()
    world.arrive(1)
    if relayed:
        world.relayed(1, 7)
    world.feed(ev.ClientLeft(1))
    assert {c.replica for c in world.commanded(CancelRequest)} == {"r2", "r0"}


def test_one_that_was_cancelled_while_it_was_handed_over_is_cancelled_on_both_again() -> None:
    world = paired()
    world.arrive(1)
    world.feed(ev.ClientLeft(1))
    world.feed(ev.Relayed("r2", 1, 1, 0, 7))
    assert {c.replica for c in world.commanded(CancelRequest)} == {"r2", "r0"}


def test_one_that_old_goes_on_with_when_it_and_the_pair_are_over_is_cancelled_there() -> None:
    """New, which was silent when the cancel came, had not given it away yet."""
    world = paired()
    world.arrive(1)
    world.feed(ev.ClientLeft(1))
    world.feed(ev.LoadEnded("r2", 1, "d", "r1", 30, 300, 64, 100, "no peer has it any more"))
    assert not world.state.pairs
    world.feed(ev.Relayed("r0", 1, 1, 0, 0))
    assert [c.replica for c in world.commanded(CancelRequest)] == ["r0"]


def test_a_link_that_breaks_under_two_parts_rests_on_both_sides() -> None:
    world = paired("decode")
    world.arrive(1)
    world.relayed(1, 7)
    world.first_token(1)
    request = world.state.requests[1]
    target = request.target
    world.feed(ev.ImportEnded(request.lease_id, 0, 9, "source", "peer was lost"))
    assert set(world.state.links) == {f"r2>{target}", f"r0>{target}"}
    world.after(1)
    assert request.target not in ("", target)
    world.imported(1)
    assert world.request_state(1) is RequestState.DECODING


def test_the_kv_of_two_parts_is_counted_where_it_leaves() -> None:
    world = paired()
    world.arrive(1)
    world.relayed(1, 12)
    world.first_token(1)
    lease = world.state.requests[1].lease_id
    links = [(k["source"], k["target"]) for k in world.state.to_json()["links"]]
    assert links[:2] == [("r0", "r1"), ("r2", "r1")]
    world.feed(ev.ImportEnded(lease, 3000, 9))
    totals = {r: (world.replica(r).kv_out, world.replica(r).kv_in) for r in ("r0", "r1", "r2")}
    assert totals == {"r0": (1800, 0), "r1": (0, 3000), "r2": (1200, 0)}


def test_what_is_too_large_for_new_is_computed_by_old() -> None:
    """New's machine has less memory: nobody waits for the end of its load because of that."""
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))
    world.moved("r2", blocks=2)
    world.arrive(1, prompt=1000)
    world.arrive(2, prompt=100)
    requests = world.state.requests
    assert [(requests[i].source, requests[i].rest) for i in (1, 2)] == [("r0", ""), ("r2", "r0")]


def test_asking_twice_is_asking_once_and_a_refusal_names_its_field() -> None:
    world = paired("spare")
    assert world.feed(ev.LivePairRequested("r2", "r0")) == []
    refused = only(world.feed(ev.LivePairRequested("r3", "r0")), ev.CommandRefused)
    assert (refused.field, refused.code) == ("old", "conflict")
    assert refused.reason == "it is OldPrefill; a Prefill can finish for another"
