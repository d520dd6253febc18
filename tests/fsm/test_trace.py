"""The Chrome trace: what Perfetto needs of it, and that it says what happened."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from blitzd.events import LogReader, types as ev
from blitzd.events.record import Record
from blitzd.fsm import ClusterState
from blitzd.fsm.pair_story import PairTeller
from blitzd.fsm.trace import COUNTED, LAYERS, LINKS, PROCESSES, REPLICAS, REQUESTS, Tracer
from blitzd.fsm.watched import WatchedState
from tests.control.harness import MS, Harness
from tests.corpus import corpus


def trace(records: list[Record], state: WatchedState | None = None) -> list[dict[str, Any]]:
    tracer = Tracer(state or WatchedState())
    events = [event for record in records for event in tracer.take(record)]
    events += tracer.finish()
    # As a reader of the file gets them.
    return msgspec.json.decode(msgspec.json.encode(events), type=list[dict[str, Any]])


def busy() -> list[Record]:
    world = Harness().serving("prefill", "decode", "spare")
    for request_id in (1, 2):
        world.arrive(request_id)
    world.now += 5 * MS
    for request_id in (1, 2):
        world.first_token(request_id)
    world.now += 7 * MS
    for request_id in (1, 2):
        world.imported(request_id)
    world.now += 2 * MS
    world.ended(1)
    return world.log


@pytest.fixture(params=[*corpus(), None], ids=lambda p: p.name if p else "busy")
def events(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return trace(busy() if request.param is None else list(LogReader(request.param).records()))


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    named = [e for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named}


def test_every_event_is_complete_and_on_a_named_track(events: list[dict[str, Any]]) -> None:
    names = tracks(events)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == PROCESSES
    for event in events:
        assert event["ph"] in "XiCM"
        assert isinstance(event["name"], str)
        assert event["pid"] in processes
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in names
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    assert len(set(names)) == sum(e["name"] == "thread_name" for e in events), "a track twice"


def test_the_spans_of_a_track_follow_each_other(events: list[dict[str, Any]]) -> None:
    """Overlapping spans of one track are drawn wrong, or not at all."""
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert spans
    for track in spans.values():
        for (_, end), (begin, _) in pairwise(track):
            assert begin >= end - 1e-6


def test_replicas_links_and_requests_have_what_they_did() -> None:
    events = trace(busy())
    names = tracks(events)

    def spans(process: int, track: str) -> list[tuple[str, float]]:
        return [
            (e["name"], e["dur"])
            for e in events
            if e["ph"] == "X" and names[e["pid"], e["tid"]] == track and e["pid"] == process
        ]

    assert [name for name, _ in spans(REPLICAS, "r1")] == [
        "Inactive",
        "LoadingDecode",
        "AusDecode",
        "Decode",
    ]
    assert spans(LINKS, "r0 → r1") == [("KV of 1", 7000)]
    assert spans(LINKS, "r0 → r1 #2") == [("KV of 2", 7000)], "they ran at once"
    assert spans(REQUESTS, "request 1") == [
        ("queued", 0),
        ("prefilling", 5000),
        ("migrating", 7000),
        ("decoding", 2000),
    ]
    [last] = [e for e in events if e["ph"] == "X" and e["args"].get("end")]
    assert (last["args"]["end"], last["args"]["finish"]) == ("finished", "stop")
    [moved] = {e["args"]["bytes_moved"] for e in events if e["pid"] == LINKS and e["ph"] == "X"}
    assert moved == 1000


def test_the_counter_ends_where_the_state_does(events: list[dict[str, Any]]) -> None:
    counters = [e["args"] for e in events if e["ph"] == "C"]
    assert counters
    assert all(min(counts.values()) >= 0 for counts in counters)


def test_it_begins_with_what_a_snapshot_has() -> None:
    log = busy()
    state = WatchedState()
    for record in log:
        state.take(record)
    again = WatchedState.decode(state.encode())
    events = trace([], again)
    open_spans = {e["name"] for e in events if e["ph"] == "X"}
    assert {"Prefill", "Decode", "decoding"} <= open_spans
    assert all(e["args"]["unfinished"] for e in events if e["ph"] == "X")


def test_counts_are_those_of_the_fold() -> None:
    log = busy()
    state = WatchedState()
    counts = [e["args"] for e in trace(log, state) if e["ph"] == "C"]
    by_state = dict.fromkeys(COUNTED, 0)
    for request in ClusterState.decode(state.encode()).requests.values():
        by_state[request.state.value] += 1
    assert counts[-1] == by_state


def live() -> list[Record]:
    """Request 1 goes to r2, which loads, and then to r0; request 2 ends on r2; 3 leaves."""
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))

    def loaded(layers: int) -> None:
        world.now += 10 * MS
        world.feed(ev.LoadMoved("r2", 1, layers, 3, 100 + 300 * layers, 1000, "r1", 64, 64))

    for layers in (0, 1):
        loaded(layers)
    for request_id in (1, 2, 3):
        world.arrive(request_id)
    loaded(2)
    world.feed(ev.Relayed("r2", 1, 1, 0, 2))
    world.feed(ev.ClientLeft(3))
    world.now += 4 * MS
    world.feed(ev.FirstTokenProduced("r0", 1, 1))
    loaded(3)
    world.feed(ev.FirstTokenProduced("r2", 1, 2))
    world.now += 1 * MS
    world.feed(ev.LoadEnded("r2", 1, "digest", "r1", 3, 1000, 64, 64))
    world.feed(ev.FollowEnded(1, "r0", 1, 1))
    return world.log


def test_layers_that_come_and_who_has_which_of_a_request() -> None:
    events = trace(live())
    names = tracks(events)
    spans: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == LAYERS:
            spans[names[LAYERS, event["tid"]]].append((event["name"], event["dur"]))
    assert spans["r2 gets"] == [
        ("embedding", 10_000),
        ("layer 0", 10_000),
        ("layer 1", 10_000),
        ("layer 2", 14_000),
        ("head", 1000),
    ]
    assert spans["r2 prefills"] == [("1: layers 0 to 1", 10_000)]
    assert spans["r0 prefills"] == [("1: layers 2 to end", 4000)]
    assert spans["r2 prefills #2"] == [("2: layers 0 to end", 24_000)]
    assert spans["r2 prefills #3"] == [("3: layers 0 to end, broken off", 10_000)]
    assert set(spans) >= {"r2 gets", "r2 prefills", "r0 prefills"}


def test_the_story_of_a_pair() -> None:
    state, teller = WatchedState(), PairTeller(1)
    for record in live():
        state.take(record)
        teller.see(record, state)
    story = teller.story
    assert (story.new, story.old, story.end) == ("r2", "r0", "settled")
    assert [round(at / 1000) for at in story.layers_us] == [20, 30, 44]
    parts = {
        request.id: [(p.side, p.first, p.last, p.broken_off) for p in request.parts]
        for request in story.requests
    }
    assert parts == {
        1: [("new", 0, 2, False), ("old", 2, None, False)],
        2: [("new", 0, None, False)],
        3: [("new", 0, None, True)],
    }
