"""The time series of a log, held against the log and against its worked sums."""

from pathlib import Path

import pytest

from blitzd.events import LogReader, types as ev
from blitzd.events.record import Record
from blitzd.fsm import ClusterState
from blitzd.fsm.series import MS, Row, Series
from tests.control.harness import Harness
from tests.corpus import corpus


def rows_of(records: list[Record], every_ms: int = 500) -> list[Row]:
    series = Series(ClusterState(), every_ms)
    rows = [row for record in records for row in series.take(record)]
    return rows + series.finish()


def ended(world: Harness, request_id: int, tokens: int) -> None:
    request = world.state.requests[request_id]
    on = (request.target, request.target_epoch)
    world.feed(ev.GenerationEnded(*on, request_id, "length", tokens, "00"))


def test_a_request_is_counted_where_it_was() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.arrive(1, prompt=100)
    world.now += 700 * MS
    world.first_token(1)
    world.imported(1)
    world.now += 1000 * MS
    ended(world, 1, tokens=11)
    world.now += 400 * MS
    world.arrive(2, prompt=30)
    rows = rows_of(world.log)
    assert [row.epoch for row in rows] == [0, 1, 2, 3, 4]
    assert [row.unix_ms for row in rows] == [500, 1000, 1500, 2000, 2500]
    assert [row.arrived_requests for row in rows] == [1, 0, 0, 0, 1]
    assert [row.prefill_tokens for row in rows] == [0, 100, 0, 0, 0]
    # Ten tokens within the second from 0.7 s to 1.7 s.
    assert [row.decode_tokens for row in rows] == [0, 3, 5, 2, 0]
    assert [row.finished_requests for row in rows] == [0, 0, 0, 1, 0]
    assert [row.kv_bytes for row in rows] == [0, 1000, 0, 0, 0]
    assert [row.weights_bytes for row in rows] == [2 * 1000, 0, 0, 0, 0]
    assert [(row.first_tokens, row.ttft_mean_ms, row.ttft_max_ms) for row in rows] == [
        (0, 0, 0),
        (1, 700, 700),
        *[(0, 0, 0)] * 3,
    ]
    assert [row.prefilling_requests for row in rows] == [1, 0, 0, 0, 1]
    assert [row.decoding_requests for row in rows] == [0, 1, 1, 0, 0]
    assert {(row.prefill_replicas, row.decode_replicas, row.loading_replicas) for row in rows} == {
        (1, 1, 0)
    }
    assert rows[0].kv_blocks and rows[2].kv_blocks and not rows[3].kv_blocks


def test_rows_come_as_soon_as_nothing_can_add_to_them() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    world.now += 3000 * MS
    world.arrive(2)
    series = Series(ClusterState(), 500)
    assert [row for record in world.log for row in series.take(record)] == []
    begun = len(world.log)
    ended(world, 1, tokens=7)
    rows = [row for record in world.log[begun:] for row in series.take(record)]
    assert [row.decode_tokens for row in rows] == [1] * 6


def test_what_is_computed_again_is_counted_again_and_its_tokens_once() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.arrive(1, prompt=100)
    world.first_token(1)
    world.imported(1)
    world.now += 1000 * MS
    world.sent[1] = 5
    on = world.state.requests[1].target
    world.feed(ev.WorkerExited(on, 1, "killed"))
    world.now += 200 * MS
    world.first_token(1)
    world.imported(1)
    world.now += 1000 * MS
    ended(world, 1, tokens=9)
    rows = rows_of(world.log, every_ms=1000)
    assert [row.prefill_tokens for row in rows] == [100, 105, 0]
    assert sum(row.decode_tokens for row in rows) == 4 + 3  # two tokens were those of prefills
    assert sum(row.first_tokens for row in rows) == 1


def test_a_restart_of_the_daemon_begins_a_new_row() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    first = [Record(r.seq, 10**18, r.mono_ns, r.cause, r.payload) for r in world.log]
    world.log.clear()
    world.now = 123 * MS  # another boot, another clock
    world.boot("prefill", "decode")
    later = [Record(r.seq, 10**18 + 3600 * 10**9, r.mono_ns, 0, r.payload) for r in world.log]
    rows = rows_of(first + later)
    assert [row.epoch for row in rows] == [0, 1]
    assert rows[1].unix_ms - rows[0].unix_ms == 3_600_000
    assert [row.prefilling_requests for row in rows] == [1, 0]


@pytest.mark.parametrize("log", corpus(), ids=lambda log: log.name)
def test_sums_are_those_of_the_log(log: Path) -> None:
    records = list(LogReader(log).records())
    rows = rows_of(records, every_ms=250)
    found = [record.payload for record in records]
    finished = [event for event in found if type(event) is ev.RequestFinished]
    assert sum(row.finished_requests for row in rows) == len(finished)
    accepted = [event for event in found if type(event) is ev.RequestAccepted]
    assert sum(row.arrived_requests for row in rows) == len(accepted)
    assert all(getattr(row, name) >= 0 for row in rows for name in Row.__struct_fields__)
    resumed = {event.request_id for event in found if type(event) is ev.RequestResumed}
    failed = any(type(event) is ev.RequestFailed and event.output_tokens for event in found)
    if not resumed and not failed:
        decoded = sum(max(0, event.output_tokens - 1) for event in finished)
        assert sum(row.decode_tokens for row in rows) == decoded
