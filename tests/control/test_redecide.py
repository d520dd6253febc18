"""Deciding a recorded log again finds the first thing that differs, whatever it is."""

import msgspec
import pytest

from blitzd.control.core import CORE_VERSION
from blitzd.control.redecide import Difference, redecide
from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm import ClusterState
from blitzd.fsm.replaying import HashDiffers, replay
from tests.control.harness import Harness


def lived(version: int = CORE_VERSION) -> list[Record]:
    world = Harness()
    roles = (("r0", "prefill"), ("r1", "decode"))
    world.feed(ev.Booted(1, "test", "local", roles, world.policy.pairs(), version))
    for replica in ("r0", "r1"):
        world.attach(replica)
        world.load(replica)
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    world.ended(1)
    return world.log


LOG = lived()


def place_of(kind: type[Payload]) -> int:
    return next(i for i, record in enumerate(LOG) if type(record.payload) is kind)


def difference_of(log: list[Record]) -> Difference:
    found = redecide(log).difference
    assert found is not None
    return found


def test_what_was_decided_is_decided_again() -> None:
    result = redecide(LOG)
    inputs = sum(not record.cause for record in LOG)
    assert (result.difference, result.turns, result.skipped) == (None, inputs, 0)


@pytest.mark.parametrize(("name", "value"), [("cause", 1), ("seq", 999)])
def test_another_envelope_is_a_difference(name: str, value: int) -> None:
    at = place_of(ev.PrefillStarted)
    log = list(LOG)
    log[at] = msgspec.structs.replace(log[at], **{name: value})
    found = difference_of(log)
    assert (found.field, found.recorded) == (name, str(value))
    assert found.decided == str(getattr(LOG[at], name))


def test_another_field_is_a_difference() -> None:
    at = place_of(ev.MigrationStarted)
    log = list(LOG)
    other = msgspec.structs.replace(log[at].payload, blocks=77)
    log[at] = msgspec.structs.replace(log[at], payload=other)
    found = difference_of(log)
    assert (found.seq, found.field, found.recorded) == (LOG[at].seq, "blocks", "77")
    assert str(found).startswith(f"record {LOG[at].seq}, blocks: 77 recorded, ")


def test_another_type_is_a_difference() -> None:
    at = place_of(ev.RequestAccepted)
    log = list(LOG)
    log[at] = msgspec.structs.replace(log[at], payload=ev.RequestRejected(1, "queue_full", ""))
    assert difference_of(log) == Difference(
        LOG[at].seq, "type", "RequestRejected", "RequestAccepted"
    )


def test_an_event_that_is_missing_is_a_difference() -> None:
    log = LOG[: place_of(ev.PrefillStarted)]
    found = difference_of(log)
    assert (found.field, found.recorded, found.decided) == ("record", "nothing", "PrefillStarted")


def test_an_event_too_many_is_a_difference() -> None:
    end = LOG[-1]
    extra = Record(end.seq + 1, 0, end.mono_ns, end.cause, ev.ScaleSet(1, 1))
    assert difference_of([*LOG, extra]) == Difference(extra.seq, "record", "ScaleSet", "nothing")


def test_another_version_s_decisions_are_only_folded() -> None:
    log = lived(CORE_VERSION + 1)
    at = place_of(ev.MigrationStarted)
    log[at] = msgspec.structs.replace(
        log[at], payload=msgspec.structs.replace(log[at].payload, blocks=3)
    )
    result = redecide(log)
    assert (result.difference, result.turns) == (None, 0)
    assert result.skipped == sum(not record.cause for record in log)


def test_another_version_s_hashes_are_checked() -> None:
    log = lived(CORE_VERSION + 1)
    end = log[-1]
    with pytest.raises(HashDiffers):
        redecide([*log, Record(end.seq + 1, 0, end.mono_ns, end.cause, ev.StateHashed("0" * 64))])


@pytest.mark.parametrize(("version", "decides"), [(CORE_VERSION, True), (CORE_VERSION + 1, False)])
def test_a_snapshot_knows_whose_decisions_follow(version: int, decides: bool) -> None:
    log = lived(version)
    begin = next(r.seq for r in log if type(r.payload) is ev.RequestArrived) - 1
    state = ClusterState()
    replay(state, log[:begin])
    result = redecide(log[begin:], ClusterState.decode(state.encode()))
    assert result.difference is None
    assert (result.turns > 0, result.skipped > 0) == (decides, not decides)
