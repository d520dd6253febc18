"""Leases of hand-overs: they live while their target gets on, and end once, by whatever comes
first."""

import pytest

from blitzd.control.commands import CancelRequest, ImportKv, ReleaseKv
from blitzd.control.leases import LINK_FAULTS
from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm import IllegalEvent, fold
from tests.control.harness import MS, Harness, RequestState, only


def migrating(*roles: str, **policy: int) -> Harness:
    world = Harness(**policy).serving(*(roles or ("prefill", "decode")))
    world.after(ms=1)
    world.arrive(1)
    world.first_token(1)
    world.sent[1] = 1
    return world


def test_a_lease_ends_early_when_its_target_does_not_get_on() -> None:
    world = migrating(lease_ttl_ms=30_000, lease_stall_ms=2000)
    world.after(ms=1999)
    assert world.state.leases
    events = world.after(ms=1)
    failed = only(events, ev.MigrationFailed)
    assert (failed.fault, failed.reason) == (
        "stalled",
        "r1 did not get on: 0 bytes in 2000 ms",
    )
    assert not world.state.leases


def test_a_heartbeat_extends_it_and_the_cap_ends_it_all_the_same() -> None:
    world = migrating(lease_ttl_ms=5000, lease_stall_ms=2000)
    for beat in range(1, 4):
        world.after(ms=1000)
        extended = only(world.feed(ev.ImportProgressed(1, beat * 100)), ev.LeaseExtended)
        assert extended.bytes_moved == beat * 100
        assert extended.expires_ns == min(world.now + 2000 * MS, 5001 * MS)
    world.after(ms=1999)
    assert world.feed(ev.ImportProgressed(1, 900)) == [], "the cap does not move"
    assert world.state.leases
    failed = only(world.after(ms=1), ev.MigrationFailed)
    assert (failed.fault, failed.reason) == ("deadline", "not there after 5000 ms")


@pytest.mark.parametrize("late", [ev.ImportProgressed(1, 5), ev.ImportEnded(1, 1000, 10)])
def test_a_late_notice_is_counted_and_changes_nothing(late: ev.ImportProgressed) -> None:
    world = migrating(lease_stall_ms=100)
    world.after(ms=100)
    assert not world.state.leases
    before = world.state.to_json()
    [ignored] = world.feed(late)
    assert isinstance(ignored, ev.StaleNoticeIgnored)
    after = world.state.to_json()
    assert after["node"]["stale_notices"] == before["node"]["stale_notices"] + 1
    assert (after["requests"], after["links"]) == (before["requests"], before["links"])


def test_a_lease_can_neither_shrink_nor_pass_its_cap() -> None:
    world = migrating(lease_ttl_ms=5000, lease_stall_ms=2000)
    lease = world.state.leases[1]
    for expires_ns in (lease.expires_ns - 1, lease.cap_ns + 1):
        event = ev.LeaseExtended(1, 10, expires_ns)
        with pytest.raises(IllegalEvent, match="expires at"):
            fold(world.state, Record(world.state.seq + 1, 0, world.now, 0, event))
    assert world.state.leases[1].bytes_moved == 0


def test_a_no_before_admission_frees_the_target_at_once_and_keeps_the_kv() -> None:
    """B.2 #33, #34: a negative acknowledgement is a message, and nothing is stranded by it."""
    world = migrating()
    world.feed(ev.ImportEnded(1, 0, 0, "no_room", "3 blocks free, 4 wanted"))
    assert world.state.blocks_reserved("r1") == 0
    assert world.state.blocks_reserved("r0") > 0, "for the retry"
    assert not world.state.links, "a full target says nothing about the link"
    world.after(ms=20)
    [call] = world.commanded(ImportKv)
    assert (call.source, call.target) == ("r0", "r1")


def test_a_target_that_can_never_run_it_is_not_asked_again() -> None:
    world = migrating("prefill", "decode", "decode")
    world.feed(ev.ImportEnded(1, 0, 0, "refused", "max_tokens: too many"))
    assert [c.target for c in world.commanded(ImportKv)] == ["r2"]
    assert not world.state.links


@pytest.mark.parametrize("fault", sorted(LINK_FAULTS | {"refused"}))
def test_every_fault_names_its_cause_and_its_peers_in_the_log(fault: str) -> None:
    """B.2 #31: never "failed for an unknown reason from another rank"."""
    world = migrating("prefill", "decode", "decode")
    events = world.feed(ev.ImportEnded(1, 0, 0, fault, "r0/1: moving the KV; what happened"))
    failed = only(events, ev.MigrationFailed)
    assert (failed.lease_id, failed.fault) == (1, fault)
    assert failed.reason == "r0/1: moving the KV; what happened"
    records = [r for r in world.log if r.payload is failed]
    cause = world.log[records[0].cause - 1].payload
    assert isinstance(cause, ev.ImportEnded)
    started = only([r.payload for r in world.log[: records[0].seq - 1]], ev.MigrationStarted)
    assert (started.source, started.target) == ("r0", "r1")


def test_kv_that_is_gone_at_the_source_is_computed_again_without_asking_others() -> None:
    world = migrating("prefill", "decode", "decode")
    events = world.feed(ev.ImportEnded(1, 0, 0, "not_held", "r0/1: request 1 is not here"))
    assert only(events, ev.RequestResumed).cause == "handover_failed"
    assert not world.commanded(ImportKv)


def test_a_request_that_may_not_be_computed_again_fails_with_the_stage() -> None:
    """B.2 #28: the error names what was waited for, long before a client gives up."""
    world = Harness(lease_stall_ms=2000).serving("prefill", "decode")
    world.after(ms=1)
    world.feed(ev.RequestArrived(1, 100, 64, 7, 600_000 * MS, resumable=0))
    world.first_token(1)
    world.sent[1] = 1
    stage = "r0/1: waiting for ExportKv's answer; nothing came for 1500 ms"
    events = world.feed(ev.ImportEnded(1, 0, 0, "stalled", stage))
    failed = only(events, ev.RequestFailed)
    assert failed.code == "handover_failed"
    assert "r1/1" in failed.reason
    assert only(events, ev.MigrationFailed).reason == stage
    assert world.now < 2000 * MS


def test_the_target_is_told_its_limits_and_gives_up_before_the_lease_does() -> None:
    world = migrating(lease_ttl_ms=30_000, lease_stall_ms=2000)
    [call] = world.commands
    assert isinstance(call, ImportKv)
    assert (call.stall_ms, call.cap_ms) == (1500, 30_000)
    assert world.state.leases[1].expires_ns == world.now + 2000 * MS


@pytest.mark.parametrize("every, verified", [(0, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_one_of_so_many_transfers_is_verified(every: int, verified: list[int]) -> None:
    world = Harness(kv_checksum_every=every).serving("prefill", "decode")
    chosen = []
    for request_id in range(1, 5):
        world.arrive(request_id)
        world.first_token(request_id)
        [call] = world.commanded(ImportKv)
        if call.checksums:
            chosen.append(call.lease_id)
        world.imported(request_id)
    assert chosen == verified


def test_a_mismatch_names_the_layer_and_both_sums_and_its_kv_is_not_used() -> None:
    world = migrating("prefill", "decode", "decode")
    sums = ("00000000deadbeef", "00000000deadbeee")
    events = world.feed(ev.ImportEnded(1, 1000, 10, "corrupt", "layer 3 differs", 3, *sums))
    assert only(events, ev.KvMismatched) == ev.KvMismatched(1, 3, *sums)
    assert only(events, ev.LinkCooled).fault == "corrupt"
    assert world.commanded(CancelRequest) == [CancelRequest("r1", 1, 1)]
    assert [c.target for c in world.commanded(ImportKv)] == ["r2"]
    assert world.state.to_json()["node"]["kv_mismatches"] == 1


def test_what_came_is_released_at_the_source_once() -> None:
    world = migrating()
    world.imported(1)
    assert world.commanded(ReleaseKv) == [ReleaseKv("r0", 1, 1)]
    assert world.request_state(1) is RequestState.DECODING


def test_after_hours_without_a_request_the_next_one_is_served() -> None:
    """B.2 #29."""
    world = Harness().serving("prefill", "decode")
    world.after(ms=2 * 3600 * 1000)
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    only(world.ended(1), ev.RequestFinished)
