"""The fold: refusals change nothing, hashes depend on the state alone."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm import ClusterState, IllegalEvent, IllegalTransition, fold
from tests.control.harness import Harness, refold


def busy_log() -> list[Record]:
    world = Harness().serving("prefill", "decode", "spare")
    for request_id in range(1, 9):
        world.arrive(request_id)
    for request_id in range(1, 5):
        world.first_token(request_id)
    world.imported(1)
    world.imported(2)
    world.ended(1)
    world.feed(ev.ClientLeft(3))
    world.feed(ev.OccupancyReported("r1", 1, 9, 2))
    world.feed(ev.WorkerExited("r2", 1, "killed"))
    return world.log


ILLEGAL: list[Payload] = [
    ev.WorkerAttached("r9", 1, 1),
    ev.WorkerAttached("r0", 2, 1),
    ev.WorkerSpawning("r0", 2),
    ev.LoadStarted("r0", 1, "prefill", "map"),
    ev.LoadStarted("r0", 1, "juggle", "map"),
    ev.LoadFinished("r1", 1, "d", "map", 30, 1, 64, 64),
    ev.DecodeOpened("r0", 1),
    ev.ReplicaRetired("r0"),
    ev.RequestAccepted(2, 10, 10, 0, 0),
    ev.PrefillStarted(2, "r0", 1, 1),
    ev.PrefillStarted(99, "r0", 1, 1),
    ev.PrefillFinished(2),
    ev.MigrationStarted(5, 2, "r0", 1, "r1", 1, 1, 1),
    ev.MigrationStarted(99, 4, "r0", 1, "r1", 1, 1, 1),
    ev.MigrationFinished(99, 1, 1),
    ev.MigrationFailed(99, "source", "", 0),
    ev.RequestFinished(4, "stop", 1, ""),
    ev.RequestFinished(1, "stop", 1, ""),
]


@pytest.mark.parametrize("event", ILLEGAL, ids=lambda event: repr(event)[:60])
def test_an_illegal_event_is_refused_and_changes_nothing(event: Payload) -> None:
    state = refold(busy_log())
    before = (state.encode(), state.hash())
    with pytest.raises((IllegalEvent, IllegalTransition)):
        fold(state, Record(state.seq + 1, 0, 0, 0, event))
    assert (state.encode(), state.hash()) == before


@given(st.integers(min_value=0, max_value=len(busy_log())))
@settings(max_examples=40, deadline=None)
def test_folding_a_prefix_then_the_rest_equals_folding_the_whole(cut: int) -> None:
    log = busy_log()
    state = refold(log[:cut])
    state = ClusterState.decode(state.encode())
    for record in log[cut:]:
        fold(state, record)
    whole = refold(log)
    assert state.hash() == whole.hash()
    assert state.to_json() == whole.to_json()


def test_the_incremental_hash_equals_the_hash_made_at_once() -> None:
    state = ClusterState()
    for record in busy_log():
        fold(state, record)
        assert state.hash() == ClusterState.decode(state.encode()).hash()


def test_any_changed_field_changes_the_hash() -> None:
    state = refold(busy_log())
    replica = state.replicas["r1"]
    seen = {state.hash()}
    for field, value in (("pid", 7), ("failures", 3), ("source", "x"), ("blocks_sampled", 1)):
        setattr(replica, field, value)
        state.touch("replica", "r1")
        seen.add(state.hash())
    assert len(seen) == 5


def test_two_processes_with_different_hash_seeds_agree() -> None:
    program = (
        "from tests.fsm.test_fold import busy_log, refold; import json;"
        "print(json.dumps(refold(busy_log()).to_json()))"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    ]
    assert json.loads(shown[0])["hash"] == json.loads(shown[1])["hash"]
    assert shown[0] == shown[1]
