"""Logs of this and of earlier versions: whole, folding to what they folded to, and decided
again as they were by the version that recorded them."""

from pathlib import Path

import pytest

from blitzd.control.core import CORE_VERSION
from blitzd.control.redecide import redecide
from blitzd.events import LogReader, types as ev
from blitzd.events.record import REGISTRY
from blitzd.events.verify import verify
from blitzd.fsm import ClusterState
from blitzd.fsm.invariants import violations
from blitzd.fsm.replaying import replay_one
from tests.corpus import LOGS, corpus, expected_of

LOG_BYTES_MAX = 400 << 10
RETIRED = {ev.PairDrained}
"""Known for logs of earlier versions; this one writes them no more."""


@pytest.fixture(params=corpus(), ids=lambda path: path.name)
def log(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_it_is_whole_and_folds_to_the_same_hash(log: Path) -> None:
    expected = expected_of(log)
    report = verify(log)
    assert report.problems == []
    assert report.last_seq == expected.last_seq
    state = ClusterState()
    found = {}
    for record in LogReader(log).records():
        replay_one(state, record)
        if record.seq in expected.hashes:
            found[record.seq] = state.hash()
    assert found == expected.hashes
    assert (state.seq, state.hash()) == (expected.last_seq, expected.hash)


def test_every_state_on_the_way_keeps_the_invariants(log: Path) -> None:
    state = ClusterState()
    for record in LogReader(log).records():
        replay_one(state, record)
        assert violations(state) == [], record


def test_every_state_on_the_way_survives_a_snapshot(log: Path) -> None:
    state = ClusterState()
    for record in LogReader(log).records():
        replay_one(state, record)
        again = ClusterState.decode(state.encode())
        assert (again.hash(), again.encode()) == (state.hash(), state.encode()), record


def test_it_is_decided_again_as_recorded(log: Path) -> None:
    result = redecide(LogReader(log).records())
    assert result.difference is None, (
        f"{result.difference}. If the decision is meant: raise CORE_VERSION, keep this log, and"
        " record new ones with scripts/record_log.py"
    )
    mine = expected_of(log).core_version == CORE_VERSION
    assert (result.turns > 0, result.skipped > 0) == (mine, not mine)


def test_this_version_has_logs_that_hold_nearly_every_type_of_record() -> None:
    """Types that the daemon writes, that is: those that a chaos run or the script gives."""
    seen: set[type] = set()
    for log in corpus():
        if expected_of(log).core_version == CORE_VERSION:
            seen |= {type(record.payload) for record in LogReader(log).records()}
    ours = {cls for type_id, cls in REGISTRY.items() if type_id < 1000} - RETIRED
    assert {cls.__name__ for cls in ours - seen} == set()
    assert sum(path.stat().st_size for path in LOGS.rglob("*.log")) < LOG_BYTES_MAX
