"""`blitzd replay`: a log folded again, and questions to it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter

from blitzd.cli import replay_text as text
from blitzd.cli.log_points import Point
from blitzd.cli.log_source import LogSource
from blitzd.cli.replay_csv import write_series
from blitzd.cli.replay_follow import follow_log
from blitzd.cli.replay_trace import write_trace
from blitzd.control.core import CORE_VERSION
from blitzd.control.explain import Explainer
from blitzd.control.redecide import redecide as decide_again
from blitzd.events import Kind, LogError
from blitzd.fsm import ClusterState, IllegalEvent, IllegalTransition
from blitzd.fsm.diff import Differ
from blitzd.fsm.pair_story import PairTeller
from blitzd.fsm.replaying import HashDiffers, replay as fold_all, replay_one
from blitzd.fsm.story import Storyteller
from blitzd.fsm.watched import WatchedState

Sequence = Annotated[int | None, Parameter(validator=cyclopts.validators.Number(gte=1))]

WITH_UNTIL = ("--state", "--request", "--trace", "--csv", "--redecide")

CSV_EVERY_MS = 500
"""As the original's statistics."""


def replay(
    directory: Path,
    *,
    until: str | None = None,
    state: bool = False,
    diff: Annotated[tuple[str, str] | None, Parameter(negative=())] = None,
    request: Sequence = None,
    plan: Sequence = None,
    pair: Sequence = None,
    trace: Path | None = None,
    csv: Path | None = None,
    every: Sequence = None,
    follow: bool = False,
    redecide: bool = False,
    json: bool = False,
) -> int:
    """Fold a log, check the state hashes in it, and say where it ends, or answer a question.

    A point is a sequence (120), a time with its zone (2026-03-01T12:00:00Z), or seconds
    after the first record (12.5s). Of the questions, one at a time.

    Parameters
    ----------
    directory
        A daemon's state directory, or its log/.
    until
        Fold no further than this point; with --redecide, than the end of its turn.
    state
        The whole state there: with --json what /admin/state gave at that sequence.
    diff
        What changed between two points, and which events did it.
    request
        The story of a request: milestones, hops, what led to what, how it ended.
    plan
        Why the record of this sequence was decided as it was.
    pair
        Draw the live pair of this number: when layers came, which side had a request when.
    trace
        Write a Chrome trace for Perfetto into this file.
    csv
        Write a time series into this file: tokens, replicas, requests, first tokens.
    every
        With --csv: milliseconds for each row, 500 by default.
    follow
        Print each event as a running daemon writes it.
    redecide
        Decide every recorded input again; exit code 1 at the first difference.
    json
        Print JSON: one object, with --follow one a line.
    """
    questions = {
        "--state": state,
        "--diff": diff is not None,
        "--request": request is not None,
        "--plan": plan is not None,
        "--pair": pair is not None,
        "--trace": trace is not None,
        "--csv": csv is not None,
        "--follow": follow,
        "--redecide": redecide,
    }
    asked = [name for name, given in questions.items() if given]
    if len(asked) > 1:
        return _usage(f"{' and '.join(asked)}: one of {', '.join(questions)} is accepted")
    if until is not None and asked and asked[0] not in WITH_UNTIL:
        return _usage(f"--until with {asked[0]}: it is accepted with {', '.join(WITH_UNTIL)}")
    if every is not None and csv is None:
        return _usage("--every: it is accepted with --csv")
    try:
        end = Point.parse(until) if until is not None else None
        between = (Point.parse(diff[0]), Point.parse(diff[1])) if diff is not None else None
    except ValueError as error:
        return _usage(f"{'--until' if until is not None else '--diff'} {error}")
    with _failures():
        source = LogSource(directory)
        last = source.sequence(end) if end else None
        if between is not None:
            return _diff(source, between, json)
        if request is not None:
            return _request(source, request, last, json)
        if plan is not None:
            return _plan(source, plan, json)
        if pair is not None:
            return _pair(source, pair, json)
        if trace is not None:
            return _trace(source, trace, last, json)
        if csv is not None:
            return _csv(source, csv, every or CSV_EVERY_MS, last, json)
        if follow:
            follow_log(source, json)
            return 0
        if redecide:
            return _redecide(source, last, json)
        return _fold(source, last, state, json)


def _usage(message: str) -> int:
    print(f"blitzd replay: {message}", file=sys.stderr)
    return 2


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # no failure: see `cli.main`
    except (LogError, OSError, IllegalEvent, IllegalTransition, HashDiffers) as error:
        print(f"blitzd replay: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _show(what: object, json: bool, as_text: Callable[[Any], str]) -> None:
    print(msgspec.json.encode(what).decode() if json else as_text(what))


def _fold(source: LogSource, until: int | None, whole: bool, json: bool) -> int:
    folded = source.begin(ClusterState, until)
    with source.bar("folding"), _placed(folded):
        for batch in source.batches(folded, until):
            fold_all(folded, batch)
    shown = folded.to_json() if whole else {"seq": folded.seq, "hash": folded.hash()}
    _show(shown, json, text.as_document)
    return 0


@contextmanager
def _placed(state: ClusterState) -> Iterator[None]:
    """Says of what the fold refuses where in the log that is."""
    try:
        yield
    except (IllegalEvent, IllegalTransition) as error:
        raise LogError(f"record {state.seq + 1} does not fit the state: {error}") from error


def _diff(source: LogSource, between: tuple[Point, Point], json: bool) -> int:
    first, last = map(source.sequence, between)
    if first > last:
        return _usage(f"--diff {between[0].text} {between[1].text}: the first point is later")
    state = source.begin(WatchedState, first)
    with source.bar("folding"), _placed(state):
        for batch in source.batches(state, first):
            fold_all(state, batch)
        differ = Differ(state)
        for record in source.records(state, last):
            differ.take(record)
    shown = {
        "from": first,
        "to": state.seq,
        "changes": differ.changes(),
        "passed": dict(sorted(differ.passed.items())),
    }
    _show(shown, json, text.as_diff)
    return 0


def _request(source: LogSource, request_id: int, until: int | None, json: bool) -> int:
    state = source.begin_early(ClusterState)
    teller = Storyteller(request_id, state)
    with source.bar("reading"), _placed(state):
        for record in source.records(state, until):
            replay_one(state, record)
            teller.see(record)
    if not teller.story.state:
        known = "it has none"
        if teller.known_ids:
            known = f"it has requests from {teller.known_ids[0]} to {teller.known_ids[1]}"
        raise LogError(f"{source.directory}: request {request_id} is not in this log; {known}")
    _show(teller.story, json, text.as_story)
    return 0


def _plan(source: LogSource, seq: int, json: bool) -> int:
    state = source.begin(ClusterState, seq - 1)
    explainer = Explainer(seq, state)
    with source.bar("folding"), _placed(state):
        for record in source.records(state):
            if not explainer.see(record):
                break
    explanation = explainer.finish()
    if explanation is None:
        raise LogError(f"{source.directory}: record {seq} is not there, the last is {state.seq}")
    _show(explanation, json, text.as_explanation)
    return 0


def _pair(source: LogSource, pair_id: int, json: bool) -> int:
    state = source.begin_early(ClusterState)
    teller = PairTeller(pair_id)
    with source.bar("reading"), _placed(state):
        for record in source.records(state):
            replay_one(state, record)
            if not teller.see(record, state):
                break
    if not teller.story.new:
        known = " to ".join(map(str, teller.known_ids)) or "none"
        raise LogError(f"{source.directory}: no pair {pair_id} in this log; it has {known}")
    _show(teller.story, json, text.as_pair)
    return 0


def _trace(source: LogSource, file: Path, until: int | None, json: bool) -> int:
    state = source.begin_early(WatchedState)
    with source.bar("tracing"), _placed(state):
        written = write_trace(file, state, source.records(state, until))
    shown = {"file": str(file), "trace_events": written, "last_seq": state.seq}
    _show(shown, json, text.as_document)
    return 0


def _csv(source: LogSource, file: Path, every_ms: int, until: int | None, json: bool) -> int:
    state = source.begin_early(ClusterState)
    with source.bar("counting"), _placed(state):
        written = write_series(file, state, source.records(state, until), every_ms)
    shown = {"file": str(file), "rows": written, "every_ms": every_ms, "last_seq": state.seq}
    _show(shown, json, text.as_document)
    return 0


def _redecide(source: LogSource, until: int | None, json: bool) -> int:
    state = source.begin_early(ClusterState)
    with source.bar("deciding"), _placed(state):
        records = source.records(state)
        if until is not None:
            # A turn is decided as a whole: that of `until` is the last.
            records = takewhile(lambda r: r.seq <= until or r.payload.kind is Kind.EVENT, records)
        result = decide_again(records, state)
    shown = {
        "core_version": CORE_VERSION,
        "turns": result.turns,
        "skipped": result.skipped,
        "difference": result.difference,
    }
    _show(shown, json, text.as_redecided)
    return 0 if result.difference is None else 1
