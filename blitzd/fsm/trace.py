"""A log as a Chrome trace, the JSON that Perfetto and chrome://tracing open.

Five processes: the cluster (how many requests are in which state), replicas (a track each,
a span for each state), links (a track for each source and target and as many beside it
as transfers run at once, since the spans of a track must not overlap), requests (a
track each, a span for each phase), and layers (of a load those that come, of a live pair who
runs which of a request; see `trace_layers`). Times are microseconds since the first record.

The format: Trace Event Format, Google, "JSON Object Format"; phases X (complete span),
i (instant), C (counter) and M (metadata).
"""

from collections import Counter
from typing import Any, NamedTuple

import msgspec

from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm.link import Lease
from blitzd.fsm.state import Key
from blitzd.fsm.story import ENDS
from blitzd.fsm.timeline import Timeline
from blitzd.fsm.trace_layers import LayerSpans
from blitzd.fsm.watched import WatchedState

TraceEvent = dict[str, Any]

CLUSTER, REPLICAS, LINKS, REQUESTS, LAYERS = 1, 2, 3, 4, 5
PROCESSES = {
    CLUSTER: "cluster",
    REPLICAS: "replicas",
    LINKS: "links",
    REQUESTS: "requests",
    LAYERS: "layers",
}
COUNTED = ("queued", "prefilling", "relayed", "migrating", "decoding")
INSTANTS: tuple[type[Payload], ...] = (
    ev.WorkerLost,
    ev.LoadFailed,
    ev.CommandRefused,
    ev.NodeStarted,
    ev.NodeDraining,
    ev.NodeStopped,
    ev.ScaleSet,
)


class _Span(NamedTuple):
    track: int
    name: str
    begin_us: float
    args: dict[str, Any]


class Tracer:
    """Each call gives the trace events that became complete with it."""

    def __init__(self, state: WatchedState) -> None:
        self._state = state
        self._timeline = Timeline()
        self._now_us = 0.0
        self._open: dict[tuple[int, str | int], _Span] = {}
        """By process and entity."""
        self._tracks: dict[tuple[int, str], int] = {}
        self._tracks_made = 0
        self._lanes: dict[str, list[int | None]] = {}
        """Link -> the lease that each of its tracks carries now."""
        self._layers = LayerSpans()
        self._counts: Counter[str] = Counter()
        self._new: list[TraceEvent] = []
        for process, name in PROCESSES.items():
            self._metadata("process_name", process, 0, {"name": name})
            self._metadata("process_sort_index", process, 0, {"sort_index": process})
        for kind in ("replica", "request", "lease"):
            table: dict[Any, Any] = getattr(state, f"{kind}s")
            for entity in table:
                self._follow((kind, entity), None)

    def take(self, record: Record) -> list[TraceEvent]:
        """Folds `record`. Raises what the fold raises."""
        self._now_us = self._timeline.at(record) / 1000
        for key in self._state.take(record):
            self._follow(key, record)
        payload = record.payload
        for span in self._layers.take(record, self._state, self._now_us):
            track = self._track(LAYERS, span.track)
            self._span(LAYERS, _Span(track, span.name, span.begin_us, span.args), {})
        if isinstance(payload, INSTANTS):
            self._instant(payload)
        new, self._new = self._new, []
        return new

    def finish(self) -> list[TraceEvent]:
        """What is still open at the end of the log ends there."""
        for key in list(self._open):
            self._end(key, {"unfinished": True})
        new, self._new = self._new, []
        return new

    def _follow(self, key: Key, record: Record | None) -> None:
        kind, name = key
        seq = record.seq if record else 0
        if kind == "replica":
            replica = self._state.replicas.get(str(name))
            shown = replica.state.value if replica else ""
            args: dict[str, Any] = {"epoch": replica.epoch, "seq": seq} if replica else {}
            self._switch((REPLICAS, name), str(name), shown, args)
        elif kind == "request":
            request = self._state.requests.get(int(name))
            shown = request.state.value if request else ""
            args = {"seq": seq}
            if request is not None:
                args |= {"source": request.source, "target": request.target}
            before = self._open.get((REQUESTS, name))
            ended = _end_of(record) if request is None else {}
            self._switch((REQUESTS, name), f"request {name}", shown, args, ended)
            self._count(before.name if before else "", shown)
            if request is None:
                self._tracks.pop((REQUESTS, f"request {name}"), None)
        elif kind == "lease":
            self._follow_lease(int(name), record)

    def _follow_lease(self, lease_id: int, record: Record | None) -> None:
        key = (LINKS, lease_id)
        lease = self._state.leases.get(lease_id)
        if lease is not None and key not in self._open:
            args = {"request": lease.request_id, "lease": lease_id}
            track = self._lane(lease)
            self._open[key] = _Span(track, f"KV of {lease.request_id}", self._now_us, args)
        elif lease is None and key in self._open:
            self._end(key, _end_of(record))
            for lanes in self._lanes.values():
                if lease_id in lanes:
                    lanes[lanes.index(lease_id)] = None

    def _lane(self, lease: Lease) -> int:
        link = f"{lease.source} → {lease.target}"
        lanes = self._lanes.setdefault(link, [])
        if None not in lanes:
            lanes.append(None)
        free = lanes.index(None)
        lanes[free] = lease.id
        return self._track(LINKS, link if free == 0 else f"{link} #{free + 1}")

    def _switch(
        self,
        key: tuple[int, str | int],
        track_name: str,
        name: str,
        args: dict[str, Any],
        ended: dict[str, Any] | None = None,
    ) -> None:
        span = self._open.get(key)
        if span is not None and span.name == name:
            return
        if span is not None:
            self._end(key, ended or {})
        if name:
            track = self._track(key[0], track_name)
            self._open[key] = _Span(track, name, self._now_us, args)

    def _end(self, key: tuple[int, str | int], args: dict[str, Any]) -> None:
        self._span(key[0], self._open.pop(key), args)

    def _span(self, process: int, span: _Span, args: dict[str, Any]) -> None:
        """It ends now."""
        self._new.append(
            {
                "name": span.name,
                "ph": "X",
                "ts": span.begin_us,
                "dur": self._now_us - span.begin_us,
                "pid": process,
                "tid": span.track,
                "args": span.args | args,
            }
        )

    def _count(self, before: str, after: str) -> None:
        if before == after:
            return
        self._counts[before] -= 1
        self._counts[after] += 1
        counts = {name: self._counts[name] for name in COUNTED}
        at = {"ts": self._now_us, "pid": CLUSTER, "tid": 0}
        self._new.append({"name": "requests", "ph": "C", **at, "args": counts})

    def _instant(self, payload: Payload) -> None:
        replica = getattr(payload, "replica", "")
        process = REPLICAS if replica else CLUSTER
        track = self._track(process, replica or "node")
        at = {"ts": self._now_us, "pid": process, "tid": track, "s": "t"}
        args = msgspec.structs.asdict(payload)
        self._new.append({"name": type(payload).__name__, "ph": "i", **at, "args": args})

    def _track(self, process: int, name: str) -> int:
        track = self._tracks.get((process, name))
        if track is None:
            self._tracks_made += 1
            track = self._tracks[process, name] = self._tracks_made
            self._metadata("thread_name", process, track, {"name": name})
            self._metadata("thread_sort_index", process, track, {"sort_index": track})
        return track

    def _metadata(self, name: str, process: int, track: int, args: dict[str, Any]) -> None:
        self._new.append({"name": name, "ph": "M", "pid": process, "tid": track, "args": args})


def _end_of(record: Record | None) -> dict[str, Any]:
    """What the event that ended a span said: bytes, reason, finish."""
    if record is None:
        return {}
    payload = record.payload
    end = ENDS.get(type(payload))
    shown = {"end": end.value} if end else {}
    return shown | {
        name: getattr(payload, name)
        for name in ("bytes_moved", "elapsed_ns", "fault", "code", "reason", "finish")
        if hasattr(payload, name)
    }
