"""The idle audit: a worker without requests holds nothing, or lets go."""

import pytest

from blitzd.control.commands import CancelRequest, EndWorker, SpawnWorker
from blitzd.events import types as ev
from tests.control.harness import Harness, only

CLEAN: dict[str, object] = {
    "blocks": 0,
    "held": (),
    "exports": (),
    "transfers": 0,
    "buffers": 0,
    "peers": (),
}


def report(world: Harness, replica: str = "r1", **changes: object) -> list[object]:
    fields = CLEAN | changes
    epoch = world.replica(replica).epoch
    return list(world.feed(ev.HoldingsReported(replica, epoch, **fields)))  # type: ignore[arg-type]


def serving(**policy: int) -> Harness:
    world = Harness(**policy).serving("prefill", "decode")
    world.after(ms=1)
    return world


@pytest.mark.parametrize(
    "what, words",
    [
        ({"blocks": 3}, "3 KV blocks"),
        ({"held": ((7, 0),)}, "1 requests"),
        ({"exports": ((7, 0), (8, 1))}, "2 exports"),
        ({"transfers": 1}, "1 transfers"),
        ({"buffers": 2}, "2 UCX buffers"),
        ({"peers": ("r0/9",)}, "connections to r0/9"),
        ({"peers": ("r0/1", "gone/1")}, "connections to gone/1"),
    ],
)
def test_whatever_is_held_without_a_request_is_found(what: dict[str, object], words: str) -> None:
    world = serving()
    assert only(report(world, **what), ev.AuditOpened).findings == words


def test_nothing_held_and_living_peers_are_no_finding() -> None:
    world = serving()
    assert report(world) == []
    assert report(world, peers=("r0/1",)) == []


def test_a_release_that_is_on_its_way_is_no_leak() -> None:
    world = serving(audit_grace_ms=2000)
    report(world, blocks=3)
    world.after(ms=1000)
    assert [type(e) for e in report(world)] == [ev.AuditPassed]
    world.after(ms=5000)
    assert isinstance(report(world, blocks=3)[0], ev.AuditOpened), "the time begins anew"


def test_what_is_named_is_cancelled_and_then_the_worker_is_replaced() -> None:
    world = serving(audit_grace_ms=2000)
    leak = {"blocks": 3, "held": ((7, 2),), "exports": ((7, 2),)}
    report(world, **leak)
    world.after(ms=1999)
    assert report(world, **leak) == []
    world.after(ms=1)
    failed = only(report(world, **leak), ev.AuditFailed)
    assert (failed.action, failed.findings) == ("cancel", "3 KV blocks; 1 requests; 1 exports")
    assert world.commands == [CancelRequest("r1", 1, 7, 2)]
    assert world.state.to_json()["node"]["audits_failed"] == 1
    world.after(ms=2000)
    events = report(world, blocks=3)
    assert only(events, ev.AuditFailed).action == "restart"
    assert only(events, ev.WorkerLost).reason == "it leaked 3 KV blocks"
    assert world.commanded(EndWorker) == [EndWorker("r1", 1)]
    assert world.commanded(SpawnWorker) == [SpawnWorker("r1", 2)]
    assert world.replica("r1").dirty_ns == 0


def test_a_cancel_that_helps_is_the_end_of_it() -> None:
    world = serving(audit_grace_ms=2000)
    report(world, held=((7, 2),))
    world.after(ms=2000)
    report(world, held=((7, 2),))
    assert [type(e) for e in report(world)] == [ev.AuditPassed]
    assert (world.replica("r1").dirty_ns, world.replica("r1").audits_failed) == (0, 0)


def test_what_names_nothing_is_replaced_at_once() -> None:
    world = serving(audit_grace_ms=2000)
    report(world, blocks=3)
    world.after(ms=2000)
    assert only(report(world, blocks=3), ev.AuditFailed).action == "restart"


def test_a_replica_with_requests_is_not_audited() -> None:
    world = serving(audit_grace_ms=2000)
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    assert report(world, blocks=3, held=((1, 0),)) == []
    world.after(ms=10_000)
    assert report(world, blocks=3, held=((1, 0),)) == []


def test_a_report_of_an_old_life_is_counted_only() -> None:
    world = serving()
    stale = ev.HoldingsReported("r1", 0, 3, (), (), 0, 0, ())
    assert [type(e) for e in world.feed(stale)] == [ev.StaleNoticeIgnored]


def test_a_state_that_breaks_its_invariants_is_reported_and_serves_on() -> None:
    world = serving()
    world.feed(ev.StateAudited(("r1 has 9 of 8 blocks reserved",)))
    assert world.state.to_json()["node"]["invariants_broken"] == 1
    world.arrive(1)
    assert world.state.requests
