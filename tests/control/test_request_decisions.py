"""The life of a request, decided from inputs: admission, hand-over, every end."""

import pytest

from blitzd.control.commands import (
    CancelRequest,
    EndWorker,
    ImportKv,
    ReleaseKv,
    ShutDown,
    SpawnWorker,
    StartPrefill,
)
from blitzd.events import types as ev
from tests.control.harness import MS, Harness, RequestState, only, refold


def test_a_request_goes_through_every_state_and_leaves_nothing_behind() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    assert world.request_state(1) is RequestState.PREFILLING
    assert world.commanded(StartPrefill) == [StartPrefill("r0", 1, 1, hold=True)]
    world.first_token(1)
    assert world.request_state(1) is RequestState.MIGRATING
    [call] = world.commanded(ImportKv)
    assert (call.source, call.target, call.request_id) == ("r0", "r1", 1)
    world.imported(1)
    assert world.request_state(1) is RequestState.DECODING
    assert world.commanded(ReleaseKv) == [ReleaseKv("r0", 1, 1)]
    finished = only(world.ended(1), ev.RequestFinished)
    assert (finished.finish, finished.output_tokens) == ("stop", 5)
    shown = world.state.to_json()
    assert shown["requests"]["finished"] == 1
    assert all(r["inflight"] == r["blocks_reserved"] == 0 for r in shown["replicas"])
    assert shown["links"] == []


def test_a_request_may_end_with_its_first_token() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1, max_tokens=1)
    only(world.ended(1), ev.RequestFinished)
    assert not world.state.requests


def test_requests_wait_in_order_until_something_can_serve_them() -> None:
    world = Harness()
    world.boot("prefill", "decode")
    world.arrive(1)
    world.arrive(2)
    assert world.state.to_json()["queue"] == {"requests": 2, "tokens": 200}
    world.attach("r0")
    world.load("r0")
    assert [c.request_id for c in world.commanded(StartPrefill)] == [1, 2]


def test_a_prefill_replica_is_granted_a_bounded_number() -> None:
    world = Harness(max_prefills_per_replica=2).serving("prefill", "decode")
    for request_id in range(1, 5):
        world.arrive(request_id)
    assert world.request_state(2) is RequestState.PREFILLING
    assert world.request_state(3) is RequestState.QUEUED
    world.first_token(1)
    assert world.request_state(3) is RequestState.PREFILLING
    assert world.request_state(4) is RequestState.QUEUED


def test_nobody_overtakes_a_long_prompt_that_waits_for_room() -> None:
    world = Harness().serving("prefill", "decode", blocks=4)
    world.arrive(1, prompt=150)
    world.arrive(2, prompt=150)
    world.arrive(3, prompt=10)
    assert world.request_state(2) is RequestState.QUEUED
    assert world.request_state(3) is RequestState.QUEUED


def test_the_least_loaded_replica_of_each_role_is_chosen() -> None:
    world = Harness().serving("prefill", "prefill", "decode", "decode")
    world.arrive(1, prompt=500)
    world.arrive(2, prompt=100)
    world.arrive(3, prompt=100)
    assert [world.state.requests[i].source for i in (1, 2, 3)] == ["r0", "r1", "r1"]
    world.first_token(1)
    world.first_token(2)
    assert [world.state.requests[i].target for i in (1, 2)] == ["r2", "r3"]


def test_kv_waits_with_the_prefill_replica_until_a_decode_replica_has_room() -> None:
    world = Harness().serving("prefill", "decode", blocks=4)
    world.arrive(1, prompt=100, max_tokens=100)
    world.first_token(1)
    world.arrive(2, prompt=20, max_tokens=10)
    world.first_token(2)
    assert world.state.requests[2].lease_id == 0
    world.imported(1)
    assert world.state.requests[2].lease_id == 0
    world.ended(1)
    assert world.state.requests[2].target == "r1"


def test_no_room_after_all_is_asked_again_later() -> None:
    world = Harness(import_retry_ms=20).serving("prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    lease = world.state.requests[1].lease_id
    world.feed(ev.ImportEnded(lease, 0, 0, "no_room", "3 blocks free, 4 wanted"))
    assert world.request_state(1) is RequestState.MIGRATING
    assert not world.commanded(ImportKv)
    assert world.state.to_json()["links"] == []
    world.after(ms=20)
    [call] = world.commanded(ImportKv)
    assert call.lease_id != lease


def test_tokens_may_come_before_the_answer_to_the_import() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    events = world.ended(1)
    assert [type(e) for e in events] == [ev.MigrationFinished, ev.RequestFinished]
    assert world.commanded(ReleaseKv) == [ReleaseKv("r0", 1, 1)]
    [late] = world.feed(ev.ImportEnded(1, 1000, 10))
    assert isinstance(late, ev.StaleNoticeIgnored)


@pytest.mark.parametrize("phase", ["queued", "prefilling", "migrating", "decoding"])
def test_a_client_that_leaves_frees_everything_in_every_phase(phase: str) -> None:
    world = Harness()
    if phase == "queued":
        world.boot("prefill", "decode")
    else:
        world.serving("prefill", "decode")
    world.arrive(1)
    if phase in ("migrating", "decoding"):
        world.first_token(1)
    if phase == "decoding":
        world.imported(1)
    assert world.request_state(1).value == phase
    only(world.feed(ev.ClientLeft(1)), ev.RequestCancelled)
    holders = {
        "queued": set(),
        "prefilling": {"r0"},
        "migrating": {"r0", "r1"},
        "decoding": {"r1"},
    }[phase]
    assert {c.replica for c in world.commanded(CancelRequest)} == holders
    assert world.feed(ev.ClientLeft(1)) == [], "leaving twice is nothing"
    assert not world.state.requests
    assert not world.state.leases
    assert world.state.to_json()["requests"]["cancelled"] == 1


def test_more_than_the_queue_holds_is_refused_and_counted() -> None:
    world = Harness(max_queued_requests=2)
    world.boot("prefill", "decode")
    world.arrive(1)
    world.arrive(2)
    refused = only(world.arrive(3), ev.RequestRejected)
    assert refused.code == "queue_full"
    assert "2 requests are waiting" in refused.reason
    assert world.state.to_json()["requests"]["rejected"] == 1


def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    world = Harness().serving("prefill", "decode", blocks=2)
    refused = only(world.arrive(1, prompt=100, max_tokens=30), ev.RequestRejected)
    assert (refused.code, refused.reason) == (
        "too_long",
        "129 tokens do not fit a decode replica's 128",
    )
    world.arrive(2, prompt=100, max_tokens=29)
    assert world.request_state(2) is RequestState.PREFILLING


def test_what_came_before_the_room_was_known_does_not_block_those_behind_it() -> None:
    world = Harness()
    world.boot("prefill", "decode")
    world.arrive(1, prompt=5000)
    world.arrive(2, prompt=10, max_tokens=10)
    for replica_id in ("r0", "r1"):
        world.attach(replica_id)
        world.load(replica_id, blocks=4)
    failed = only([r.payload for r in world.log], ev.RequestFailed)
    assert (failed.request_id, failed.code) == (1, "too_long")
    assert world.request_state(2) is RequestState.PREFILLING


def test_a_request_past_its_deadline_fails_and_says_where_it_was() -> None:
    world = Harness()
    world.boot("prefill", "decode")
    world.feed(ev.RequestArrived(1, 10, 10, 0, 500 * MS))
    failed = only(world.after(ms=500), ev.RequestFailed)
    assert (failed.code, failed.reason) == ("deadline", "still queued after 500 ms")


def test_draining_finishes_what_runs_refuses_the_new_and_then_stops() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.feed(ev.StopRequested("SIGTERM", world.now + 1000 * MS))
    assert only(world.arrive(2), ev.RequestRejected).code == "draining"
    world.first_token(1)
    world.imported(1)
    events = world.ended(1)
    assert isinstance(events[-1], ev.NodeStopped)
    assert {c.replica for c in world.commanded(EndWorker)} == {"r0", "r1"}
    assert world.commanded(ShutDown)
    assert world.state.to_json()["requests"]["finished"] == 1


def test_a_worker_lost_while_draining_is_replaced_for_those_that_wait_for_it() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.feed(ev.StopRequested("SIGTERM", world.now + 60_000 * MS))
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    assert world.commanded(SpawnWorker) == [SpawnWorker("r1", 2)]
    world.attach("r1")
    world.load("r1")
    world.first_token(1)
    world.imported(1)
    assert isinstance(world.ended(1)[-1], ev.NodeStopped)


def test_the_drain_deadline_ends_what_is_left_with_a_reason() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.feed(ev.StopRequested("SIGTERM", world.now + 1000 * MS))
    events = world.after(ms=1000)
    assert only(events, ev.RequestFailed).code == "shutdown"
    assert only(events, ev.NodeStopped).reason == "1 requests were cut off"
    assert world.commanded(ShutDown)


def test_an_input_that_changes_nothing_is_not_logged() -> None:
    world = Harness().serving("prefill", "decode")
    length = len(world.log)
    world.after(ms=50)
    world.feed(ev.OccupancyReported("r0", 1, 0, 0))
    assert len(world.log) == length


def test_the_log_alone_gives_the_same_state_and_hash() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    for request_id in range(1, 6):
        world.arrive(request_id)
        world.first_token(request_id)
    world.imported(1)
    world.feed(ev.ClientLeft(2))
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    again = refold(world.log)
    assert again.to_json() == world.state.to_json()
    assert [r.seq for r in world.log] == list(range(1, len(world.log) + 1))
