"""`blitzd replay` as an operator and a script meet it."""

import csv
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blitzd.cli import app
from blitzd.control.core import CORE_VERSION
from blitzd.events import (
    LogReader,
    LogWriter,
    Record,
    Snapshot,
    apply_retention,
    types as ev,
    write_snapshot,
)
from blitzd.fsm import ClusterState
from blitzd.fsm.replaying import replay as fold_all
from tests.control.harness import MS, Harness
from tests.corpus import corpus, current, expected_of, with_faults

WALL_NS = 1_764_435_600_123_456_789
FAULTS = with_faults()[-1]


class Answer:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*tokens: object) -> Answer:
        with pytest.raises(SystemExit) as end:
            app(["replay", *map(str, tokens)])
        out, err = capsys.readouterr()
        return Answer(end.value.code if isinstance(end.value.code, int) else 0, out, err)

    return call


def history() -> list[list[Record]]:
    """Turns a second apart, of three requests."""
    world = Harness()
    turns: list[list[Record]] = []
    begun = 0

    def cut() -> None:
        nonlocal begun
        if len(world.log) > begun:
            wall_ns = WALL_NS + world.now
            turns.append(
                [Record(r.seq, wall_ns, r.mono_ns, r.cause, r.payload) for r in world.log[begun:]]
            )
        begun = len(world.log)
        world.now += 1000 * MS

    feed = world.feed

    def feed_and_cut(payload: ev.Payload) -> list[ev.Payload]:
        events = feed(payload)
        cut()
        return events

    world.feed = feed_and_cut  # type: ignore[method-assign]
    world.serving("prefill", "decode")
    for request_id in (1, 2, 3):
        world.arrive(request_id)
        world.first_token(request_id)
        world.imported(request_id)
        world.ended(request_id)
    return turns


TURNS = history()
LAST_SEQ = TURNS[-1][-1].seq


def write(directory: Path, turns: list[list[Record]], segment_bytes: int = 1500) -> Path:
    writer = LogWriter.open(directory / "log", segment_bytes=segment_bytes)
    for turn in turns:
        writer.append(turn)
        writer.sync()
    writer.close()
    return directory


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "state", TURNS)


def state_at(seq: int) -> ClusterState:
    state = ClusterState()
    fold_all(state, [record for turn in TURNS for record in turn if record.seq <= seq])
    return state


def shorten(log: Path) -> int:
    """Two snapshots and retention: the beginning goes. Returns the first sequence left."""
    ends = [turn[-1].seq for turn in TURNS]
    for seq in (ends[-6], ends[-2]):
        state = state_at(seq)
        write_snapshot(log / "log", Snapshot(seq, state.hash(), state.encode()))
    assert apply_retention(log / "log")
    first = LogReader(log).first_seq
    assert 1 < first <= ends[-6]
    return first


# Where it ends.


def test_it_says_where_the_log_ends(replay: Any, log: Path) -> None:
    answer = replay(log, "--json")
    assert answer.code == 0
    assert answer.json == {"seq": LAST_SEQ, "hash": state_at(LAST_SEQ).hash()}


def test_the_state_of_a_corpus_log_has_its_hash(replay: Any) -> None:
    shown = replay(FAULTS, "--state", "--json").json
    assert shown["hash"] == expected_of(FAULTS).hash
    assert {replica["id"] for replica in shown["replicas"]} >= {"r0", "r1"}


@pytest.mark.parametrize("turn", [0, 5, len(TURNS) - 1])
def test_until_takes_a_sequence_a_time_and_seconds(replay: Any, log: Path, turn: int) -> None:
    first, last = TURNS[turn][0], TURNS[turn][-1]
    wall_us = last.wall_ns // 1000
    seconds, rest = divmod(wall_us, 10**6)
    moment = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:06d}Z"
    since_s = (first.mono_ns - TURNS[0][0].mono_ns) / 1e9
    for point in (last.seq, moment, f"{since_s}s"):
        shown = replay(log, "--until", point, "--json").json
        assert shown == {"seq": last.seq, "hash": state_at(last.seq).hash()}, point


def test_until_a_moment_before_the_log_is_refused(replay: Any, log: Path) -> None:
    answer = replay(log, "--until", "2001-01-01T00:00:00Z")
    assert answer.code == 1
    assert "no record is as old as 2001-01-01T00:00:00Z" in answer.err


# Wrong use.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--state", "--redecide"), "--state and --redecide: one of --state, --diff"),
        (("--until", "5", "--follow"), "with --state, --request, --trace, --csv, --redecide"),
        (("--every", "5"), "--every: it is accepted with --csv"),
        (("--until", "5", "--diff", "1", "2"), "--until with --diff"),
        (("--until", "yesterday"), "'yesterday' is no point of a log; accepted: a sequence"),
        (("--until", "2026-03-01T12:00:00"), "a time with its zone"),
        (("--diff", "5", "soon"), "--diff 'soon' is no point"),
        (("--diff", "9", "5"), "the first point is later"),
        (("--request", "0"), "Must be >= 1"),
        (("--plan", "x"), "int"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_wrong_use_says_what_is_accepted(
    replay: Any, log: Path, options: tuple[str, ...], says: str
) -> None:
    answer = replay(log, *options)
    assert answer.code == 2
    assert says in answer.err + answer.out


def test_no_log_is_a_failure(replay: Any, tmp_path: Path) -> None:
    answer = replay(tmp_path)
    assert answer.code == 1
    assert "no log here" in answer.err


def test_a_record_that_does_not_fit_is_named(replay: Any, tmp_path: Path) -> None:
    wrong = Record(LAST_SEQ + 1, WALL_NS, 10**12, 0, ev.RequestFinished(77, "stop", 1, ""))
    write(tmp_path, [*TURNS, [wrong]])
    answer = replay(tmp_path)
    assert answer.code == 1
    assert f"record {LAST_SEQ + 1} does not fit" in answer.err
    assert "request 77 is not under way" in answer.err


def test_a_hash_that_differs_is_named(replay: Any, tmp_path: Path) -> None:
    wrong = Record(LAST_SEQ + 1, WALL_NS, 10**12, 0, ev.StateHashed("0" * 64))
    write(tmp_path, [*TURNS, [wrong]])
    for options in ((), ("--state",), ("--request", "1"), ("--trace", tmp_path / "t.json")):
        answer = replay(tmp_path, *options)
        assert answer.code == 1
        assert f"record {LAST_SEQ + 1} says that the state's hash was 000" in answer.err
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(("terminal", "shown"), [("1", True), ("0", False)])
def test_a_person_sees_how_far_a_long_log_is_read(
    replay: Any, log: Path, monkeypatch: pytest.MonkeyPatch, terminal: str, shown: bool
) -> None:
    monkeypatch.setattr("blitzd.cli.log_source.BAR_FROM_BYTES", 0)
    monkeypatch.setenv("TTY_COMPATIBLE", terminal)
    answer = replay(log, "--json")
    assert ("folding" in answer.err) == shown
    assert answer.json["seq"] == LAST_SEQ


# Questions.


def test_a_difference_between_two_points(replay: Any, log: Path) -> None:
    opened = next(r.seq for t in TURNS for r in t if type(r.payload) is ev.DecodeOpened)
    shown = replay(log, "--diff", opened - 1, opened, "--json").json
    assert (shown["from"], shown["to"]) == (opened - 1, opened)
    [change] = [c for c in shown["changes"] if c["field"] == "state"]
    assert change == {
        "entity": "replica",
        "key": "r1",
        "field": "state",
        "before": "AusDecode",
        "after": "Decode",
        "events": [opened],
        "event_count": 1,
    }
    text = replay(log, "--diff", opened - 1, opened).out
    assert f'replica r1  state: "AusDecode" → "Decode"  (by {opened})' in text


def test_the_story_of_a_request(replay: Any, log: Path) -> None:
    shown = replay(log, "--request", 2, "--json").json
    assert shown["state"] == "finished"
    assert [hop["bytes_moved"] for hop in shown["hops"]] == [1000]
    assert [cause["type"] for cause in shown["causes"]] == ["RequestFinished", "GenerationEnded"]
    text = replay(log, "--request", 2).out
    assert "request 2: finished (stop)" in text
    assert "r0/1 → r1/1" in text


def test_the_story_of_a_request_that_outlived_its_worker(replay: Any) -> None:
    text = replay(current("resumes"), "--request", 1).out
    assert "RequestResumed on r0/1 → queued (worker_lost: killed; goes on after 9 tokens)" in text


def test_a_request_that_is_not_there_is_named(replay: Any, log: Path) -> None:
    answer = replay(log, "--request", 99)
    assert answer.code == 1
    assert "request 99 is not in this log; it has requests from 1 to 3" in answer.err


def test_why_a_decision(replay: Any, log: Path) -> None:
    seq = next(r.seq for t in TURNS for r in t if type(r.payload) is ev.MigrationStarted)
    shown = replay(log, "--plan", seq, "--json").json
    assert shown["cause"]["type"] == "FirstTokenProduced"
    assert [(c["replica"], c["chosen"]) for c in shown["candidates"]] == [
        ("r1", True),
        ("r0", False),
    ]
    text = replay(log, "--plan", seq).out
    assert "it is Prefill and accepts no KV" in text
    assert replay(log, "--plan", LAST_SEQ + 1).code == 1


def test_a_trace_is_one_json_document(replay: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    shown = replay(FAULTS, "--trace", file, "--json").json
    document = json.loads(file.read_text())
    assert len(document["traceEvents"]) == shown["trace_events"]
    assert document["displayTimeUnit"] == "ms"
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_series_has_a_row_for_each_interval(replay: Any, log: Path, tmp_path: Path) -> None:
    file = tmp_path / "series.csv"
    shown = replay(log, "--csv", file, "--every", 250, "--json").json
    with file.open(newline="") as lines:
        table = list(csv.DictReader(lines))
    assert len(table) == shown["rows"]
    assert list(table[0])[:4] == ["epoch", "prefill_tokens", "decode_tokens", "unix_ms"]
    times = [int(row["unix_ms"]) for row in table]
    assert times[0] == (WALL_NS + TURNS[0][0].mono_ns) // MS + 250
    assert {later - sooner for sooner, later in pairwise(times)} == {250}
    assert sum(int(row["finished_requests"]) for row in table) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"series.csv", "state"}


def test_a_live_pair_is_drawn(replay: Any) -> None:
    pairs = current("pairs")
    shown = replay(pairs, "--pair", 1, "--json").json
    drawn = replay(pairs, "--pair", 1).out.splitlines()
    assert drawn[0].startswith(f"pair 1: {shown['new']} loads, {shown['old']} finishes for it")
    rows = [line for line in drawn if line.split()[0].isdigit() and " on new" in line]
    assert [int(row.split()[0]) for row in rows] == [r["id"] for r in shown["requests"]]
    assert rows, "no request in that pair"
    for row, request in zip(rows, shown["requests"], strict=True):
        sides = {part["side"] for part in request["parts"]}
        assert ("n" in row.split()[1], "O" in row.split()[1]) == ("new" in sides, "old" in sides)
    refused = replay(pairs, "--pair", 99)
    assert refused.code == 1 and "no pair 99 in this log; it has 1" in refused.err


def test_deciding_again(replay: Any, log: Path) -> None:
    shown = replay(log, "--redecide", "--json").json
    assert shown["turns"] == len(TURNS)
    assert shown["difference"] is None
    for recorded in corpus():
        answer = replay(recorded, "--redecide")
        ours = expected_of(recorded).core_version == CORE_VERSION
        assert answer.code == 0
        assert ("of other core versions only folded" in answer.out) != ours


def test_a_decision_that_differs_is_shown_field_by_field(replay: Any, tmp_path: Path) -> None:
    turns = [list(turn) for turn in TURNS]
    for turn in turns:
        for i, r in enumerate(turn):
            if type(r.payload) is ev.PrefillStarted and r.payload.request_id == 2:
                other = ev.PrefillStarted(2, "r0", 1, r.payload.blocks + 1)
                turn[i] = Record(r.seq, r.wall_ns, r.mono_ns, r.cause, other)
                changed = r.seq
    write(tmp_path, turns)
    answer = replay(tmp_path, "--redecide", "--json")
    assert answer.code == 1
    difference = answer.json["difference"]
    assert difference == {"seq": changed, "field": "blocks", "recorded": "3", "decided": "2"}
    # The turn before it, from its middle on: only whole turns are decided again.
    before = replay(tmp_path, "--redecide", "--until", changed - 4, "--json")
    assert (before.code, before.json["difference"]) == (0, None)


# A log whose beginning is gone.


def test_it_begins_at_a_snapshot_where_the_beginning_is_gone(replay: Any, log: Path) -> None:
    shorten(log)
    shown = replay(log, "--state", "--json").json
    assert shown["hash"] == state_at(LAST_SEQ).hash()
    assert replay(log, "--redecide", "--json").json["difference"] is None
    last = TURNS[-4][-1].seq
    assert replay(log, "--until", last, "--json").json["hash"] == state_at(last).hash()
    assert replay(log, "--diff", last, LAST_SEQ, "--json").json["to"] == LAST_SEQ
    assert replay(log, "--request", 3, "--json").json["state"] == "finished"
    assert replay(log, "--plan", last, "--json").json["record"]["seq"] == last


def test_a_point_before_every_snapshot_is_refused(replay: Any, log: Path) -> None:
    first = shorten(log)
    answer = replay(log, "--until", first)
    assert answer.code == 1
    assert f"the log begins at record {first}, and there is no snapshot at or before" in answer.err


# Following.


def test_follow_shows_what_is_written_as_it_is_written(tmp_path: Path) -> None:
    directory = write(tmp_path, TURNS[:-1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "blitzd", "replay", str(directory), "--follow"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        bufsize=1,
        # Whoever runs the tests in the background of a shell ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    try:
        before = [process.stdout.readline() for _ in range(10)]
        assert f" {TURNS[-2][-1].seq} " in before[-1]
        writer = LogWriter.open(directory / "log")
        writer.append(TURNS[-1])
        writer.close()
        lines = [process.stdout.readline() for _ in TURNS[-1]]
        assert "GenerationEnded" in lines[0]
        assert f"<{TURNS[-1][0].seq} RequestFinished request_id=3" in lines[1]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
