"""What becomes of requests whose worker, or whose hand-over, is lost."""

import pytest

from blitzd.control.commands import CancelRequest, ImportKv, ReleaseKv, StartPrefill
from blitzd.control.redecide import redecide
from blitzd.events import types as ev
from tests.control.harness import MS, Harness, RequestState, only, refold


def decoding(*roles: str, output: int = 5, **policy: int) -> Harness:
    """Request 1 decodes; its client has `output` tokens."""
    world = Harness(**policy).serving(*roles)
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    world.sent[1] = output
    return world


def lose(world: Harness, replica_id: str) -> list[object]:
    exited = ev.WorkerExited(replica_id, world.replica(replica_id).epoch, "killed by SIGKILL")
    return [*world.feed(exited)]


def test_a_request_whose_worker_died_goes_on_after_the_tokens_its_client_has() -> None:
    world = decoding("prefill", "decode", "decode", output=5)
    target = world.state.requests[1].target
    resumed = only(lose(world, target), ev.RequestResumed)
    assert (resumed.request_id, resumed.cause, resumed.output_tokens) == (1, "worker_lost", 5)
    assert (resumed.replica, resumed.epoch, resumed.reason) == (target, 1, "killed by SIGKILL")
    # In the same turn, as another attempt than the one that died.
    assert world.commanded(StartPrefill) == [StartPrefill("r0", 1, 1, hold=True, attempt=1)]
    world.first_token(1)
    [call] = world.commanded(ImportKv)
    assert (call.target != target, call.attempt) == (True, 1)
    world.imported(1)
    assert world.commanded(ReleaseKv) == [ReleaseKv("r0", 1, 1, attempt=1)]
    only(world.ended(1), ev.RequestFinished)
    assert refold(world.log).hash() == world.state.hash()


def test_only_the_requests_of_the_lost_worker_are_touched() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    for request_id in (1, 2):
        world.arrive(request_id)
        world.first_token(request_id)
        world.imported(request_id)
    events = lose(world, world.state.requests[1].target)
    assert only(events, ev.RequestResumed).request_id == 1
    assert world.request_state(2) is RequestState.DECODING


def test_a_resumed_request_keeps_its_place_in_the_queue() -> None:
    world = Harness(max_prefills_per_replica=1).serving("prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    for request_id in (2, 3):
        world.arrive(request_id)
    lose(world, "r1")
    assert [r.id for r in world.state.queued()] == [1, 3], "2 was being prefilled before"
    world.first_token(2)
    assert world.request_state(1) is RequestState.PREFILLING
    assert world.request_state(3) is RequestState.QUEUED


@pytest.mark.parametrize("phase", ["prefilling", "held", "migrating", "decoding"])
def test_whatever_it_did_on_the_lost_replica_it_is_queued_again(phase: str) -> None:
    world = Harness()
    world.serving("prefill", "decode") if phase != "held" else world.serving("prefill")
    world.arrive(1)
    if phase != "prefilling":
        world.first_token(1)
    if phase == "decoding":
        world.imported(1)
    world.sent[1] = {"prefilling": 0, "decoding": 9}.get(phase, 1)
    lost = "r1" if phase == "decoding" else "r0"
    other = {"migrating": [CancelRequest("r1", 1, 1)]}.get(phase, [])
    resumed = only(lose(world, lost), ev.RequestResumed)
    assert resumed.output_tokens == world.sent[1]
    assert [c for c in world.commanded(CancelRequest) if c.replica != lost] == other
    request = world.state.requests[1]
    assert (request.target, request.lease_id, request.resumes) == ("", 0, 1)
    assert not world.state.leases


def test_a_lost_target_is_replaced_by_another_while_the_source_has_the_kv() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.after(ms=1)
    world.arrive(1)
    world.first_token(1)
    world.sent[1] = 1
    events = lose(world, "r1")
    failed = only(events, ev.MigrationFailed)
    assert (failed.fault, failed.reason) == ("target", "killed by SIGKILL")
    [call] = world.commanded(ImportKv)
    assert (call.source, call.target, call.attempt) == ("r0", "r2", 0)
    assert world.state.requests[1].resumes == 0, "nothing was computed again"


@pytest.mark.parametrize("fault", ["target", "deadline", "source"])
def test_a_failed_hand_over_is_tried_with_every_target_once_then_computed_again(fault: str) -> None:
    world = Harness(link_cooldown_ms=50).serving("prefill", "decode", "decode")
    world.after(ms=1)
    world.arrive(1)
    world.first_token(1)
    world.sent[1] = 1
    world.feed(ev.ImportEnded(1, 0, 0, fault, "checksums differ"))
    assert world.commanded(CancelRequest) == [CancelRequest("r1", 1, 1)], "it may have begun"
    assert [c.target for c in world.commanded(ImportKv)] == ["r2"]
    events = world.feed(ev.ImportEnded(2, 0, 0, fault, "checksums differ"))
    resumed = only(events, ev.RequestResumed)
    assert resumed.cause == "handover_failed"
    assert resumed.reason == "its KV could not be handed to r1/1, r2/1"
    assert set(world.commanded(CancelRequest)) == {
        CancelRequest("r2", 1, 1),
        CancelRequest("r0", 1, 1),
    }
    world.after(ms=100)
    world.first_token(1)
    # All may be asked again, the one that failed last comes last.
    assert [c.target for c in world.commanded(ImportKv)] == ["r1"]


def test_a_source_that_lost_the_kv_means_computing_again() -> None:
    world = Harness(resume_backoff_ms=100).serving("prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    world.sent[1] = 1
    events = world.feed(ev.ImportEnded(1, 0, 0, "not_held", "peer r0/1 was lost"))
    assert only(events, ev.MigrationFailed).retry_ns == 0
    resumed = only(events, ev.RequestResumed)
    assert resumed.reason == "peer r0/1 was lost"
    assert set(world.commands) == {CancelRequest("r0", 1, 1), CancelRequest("r1", 1, 1)}
    # The source may be dying, which will be known by then.
    assert not world.commanded(StartPrefill)
    world.after(ms=99)
    assert not world.commanded(StartPrefill)
    world.after(ms=1)
    assert world.commanded(StartPrefill)


def test_who_waits_after_a_loss_keeps_nobody_behind_it() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.feed(ev.RequestErrored("r0", 1, 1, "unavailable: connection lost", lost=1))
    world.arrive(2)
    assert world.request_state(1) is RequestState.QUEUED
    assert world.request_state(2) is RequestState.PREFILLING


def test_a_lease_expires_by_itself_and_its_late_answer_is_counted() -> None:
    world = Harness(lease_ttl_ms=1000).serving("prefill", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    world.after(ms=999)
    assert list(world.state.leases) == [1]
    failed = only(world.after(ms=1), ev.MigrationFailed)
    assert (failed.fault, failed.reason) == ("deadline", "not there after 1000 ms")
    assert [c.target for c in world.commanded(ImportKv)] == ["r2"]
    [late] = world.feed(ev.ImportEnded(1, 1000, 10))
    assert isinstance(late, ev.StaleNoticeIgnored)


def test_tokens_of_the_target_say_that_the_kv_has_arrived() -> None:
    """Else its death would have another target take up KV that is behind the client."""
    world = Harness().serving("prefill", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    events = world.feed(ev.FirstTokenProduced("r1", 1, 1, held=0))
    only(events, ev.MigrationFinished)
    world.sent[1] = 2
    assert only(lose(world, "r1"), ev.RequestResumed).output_tokens == 2


def test_a_request_that_kills_its_workers_is_given_up_with_their_names() -> None:
    world = Harness(max_resumes=2).serving("prefill", "prefill", "prefill", "decode")
    world.arrive(1)
    hosts = []
    for _ in range(2):
        hosts.append(world.state.requests[1].source)
        only(lose(world, hosts[-1]), ev.RequestResumed)
    hosts.append(world.state.requests[1].source)
    failed = only(lose(world, hosts[-1]), ev.RequestFailed)
    assert failed.code == "resumes_exhausted"
    assert len(set(hosts)) == 3, "each time another one, where there is one"
    places = ", ".join(f"{host}/1 (killed by SIGKILL)" for host in hosts)
    assert failed.reason == f"3 attempts; without a new token lost on {places}"


def test_one_that_moves_on_is_resumed_more_often_than_that() -> None:
    world = decoding("prefill", "prefill", "decode", "decode", max_resumes=1)
    for tokens in range(10, 20):
        world.sent[1] = tokens
        target = world.state.requests[1].target
        assert only(lose(world, target), ev.RequestResumed).output_tokens == tokens
        world.attach(target)
        world.load(target)
        world.first_token(1)
        world.imported(1)
    assert world.state.requests[1].resumes == 10


def test_attempts_are_bounded_all_the_same() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1, max_tokens=1000)
    for tokens in range(300):
        world.sent[1] = tokens + 1
        request = world.state.requests[1]
        events = world.feed(ev.RequestErrored("r0", 1, 1, "step failed", request.resumes, lost=1))
        if any(isinstance(event, ev.RequestFailed) for event in events):
            break
        world.after(ms=100)
    assert only(events, ev.RequestFailed).code == "resumes_exhausted"
    assert tokens == 255


def test_the_room_that_a_resumed_request_needs_counts_its_output() -> None:
    world = decoding("prefill", "decode", "decode", output=60)
    lose(world, world.state.requests[1].target)
    request = world.state.requests[1]
    assert request.source_blocks == 3, "100 + 60 + 1 tokens in blocks of 64"


def test_the_last_token_alone_needs_no_hand_over() -> None:
    world = decoding("prefill", "decode", "decode", output=63)
    lose(world, world.state.requests[1].target)
    assert [c.hold for c in world.commanded(StartPrefill)] == [False]


def test_who_wants_no_second_computation_gets_an_error_instead() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.feed(ev.RequestArrived(1, 100, 64, 7, 0, resumable=0))
    world.first_token(1)
    world.sent[1] = 1
    lose(world, "r1")
    assert world.request_state(1) is RequestState.MIGRATING, "moving KV computes nothing again"
    failed = only(lose(world, "r0"), ev.RequestFailed)
    assert (failed.code, failed.output_tokens) == ("worker_lost", 1)
    assert failed.reason == "lost on r0/1 (killed by SIGKILL)"


@pytest.mark.parametrize("lost", [0, 1])
def test_what_a_worker_refuses_fails_what_it_loses_is_resumed(lost: int) -> None:
    world = decoding("prefill", "decode")
    events = world.feed(ev.RequestErrored("r1", 1, 1, "step 7 failed: NaN", 0, lost))
    assert world.commanded(CancelRequest) == [CancelRequest("r1", 1, 1)]
    if lost:
        assert only(events, ev.RequestResumed).cause == "engine_error"
    else:
        failed = only(events, ev.RequestFailed)
        assert (failed.code, failed.reason) == ("engine_error", "replica r1: step 7 failed: NaN")


def test_news_of_an_earlier_attempt_is_counted_and_changes_nothing() -> None:
    world = decoding("prefill", "decode")
    world.feed(ev.RequestErrored("r1", 1, 1, "step failed", 0, lost=1))
    world.after(ms=100)
    assert world.request_state(1) is RequestState.PREFILLING
    world.first_token(1)
    world.imported(1)
    stale = [
        ev.RequestErrored("r1", 1, 1, "step failed", 0, lost=1),
        ev.FirstTokenProduced("r0", 1, 1),
        ev.TokensOutdated("r1", 1, 3),
    ]
    for notice in stale:
        [event] = world.feed(notice)
        assert isinstance(event, ev.StaleNoticeIgnored)
    assert world.request_state(1) is RequestState.DECODING
    assert world.state.to_json()["node"]["stale_notices"] == len(stale)


def test_with_the_last_replica_of_a_role_gone_requests_wait_for_the_new_one() -> None:
    world = decoding("prefill", "decode")
    lose(world, "r1")
    world.first_token(1)
    assert world.request_state(1) is RequestState.MIGRATING
    lose(world, "r0")
    assert world.request_state(1) is RequestState.QUEUED
    for replica_id in ("r0", "r1"):
        world.attach(replica_id)
        world.load(replica_id)
    world.first_token(1)
    world.imported(1)
    only(world.ended(1), ev.RequestFinished)


def test_and_no_longer_than_their_deadline() -> None:
    world = Harness().serving("prefill", "decode")
    world.feed(ev.RequestArrived(1, 100, 64, 7, 500 * MS))
    world.sent[1] = 1
    world.first_token(1)
    lose(world, "r0")
    failed = only(world.after(ms=500), ev.RequestFailed)
    assert (failed.code, failed.output_tokens) == ("deadline", 1)
    assert failed.reason == "still queued after 500 ms"


def test_what_the_driver_counted_is_in_the_log_for_deciding_again() -> None:
    world = decoding("prefill", "decode", "decode", output=17, max_resumes=1)
    lose(world, world.state.requests[1].target)
    lose(world, "r0")
    failed = [r.payload for r in world.log if isinstance(r.payload, ev.RequestFailed)]
    assert [f.code for f in failed] == ["resumes_exhausted"]
    assert redecide(world.log).difference is None


def test_the_wait_after_losses_in_a_row_is_bounded_however_many_are_allowed() -> None:
    """Doubled 63 times it would be no time that a log can hold."""
    world = Harness(max_resumes=200, resume_backoff_ms=100, restart_backoff_max_ms=30_000)
    world.serving("prefill")
    world.arrive(1)
    waits = []
    for attempt in range(100):
        lost = ev.RequestErrored("r0", 1, 1, "NaN in logits", attempt=attempt, lost=1)
        waits.append((only(world.feed(lost), ev.RequestResumed).retry_ns - world.now) // MS)
        world.after(ms=waits[-1])
    assert waits[:3] == [100, 200, 400]
    assert max(waits) == waits[-1] == 30_000
