"""The zigzag in a log: when each layer came to a replica that loads, and which replica of a live
pair had a request when.

The log has no single layers that ran, only where the request went and after how many; so a
span of a request is the time that it lay with that replica, waiting for a layer or running one.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import ReplicaState


class LayerSpan(NamedTuple):
    """One that has just ended."""

    track: str
    name: str
    begin_us: float
    args: dict[str, Any]


class _Load(NamedTuple):
    since_us: float
    layers: int
    """That are there; -1: not even the embedding is."""


class _Part(NamedTuple):
    replica: str
    lane: int
    first: int
    begin_us: float


LEFT = (ev.RequestResumed, ev.RequestFailed, ev.RequestCancelled, ev.RequestReturned)
"""After these a request runs on neither side."""


class LayerSpans:
    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._parts: dict[int, _Part] = {}
        """By request: where it is prefilled now."""
        self._lanes: dict[str, list[int | None]] = {}
        """By replica: the request that each of its tracks shows, as spans must not overlap."""

    @property
    def open(self) -> set[int]:
        """Requests that a pair prefills."""
        return set(self._parts)

    def take(self, record: Record, state: ClusterState, now_us: float) -> Iterator[LayerSpan]:
        """The spans that end with `record`, which is folded into `state`."""
        match record.payload:
            case ev.LoadStarted(replica=replica) | ev.PairOpened(new=replica):
                self._loads[replica] = _Load(now_us, -1)
            case ev.LoadProgressed() as moved:
                yield from self._came(moved.replica, moved.layers_ready, now_us)
            case ev.LoadFinished() as ended:
                yield from self._came(ended.replica, ended.layers_total, now_us)
                yield from self._complete(ended.replica, now_us)
            case ev.LoadFailed(replica=replica) | ev.WorkerLost(replica=replica):
                self._loads.pop(replica, None)
            case payload:
                yield from self._request(payload, state, now_us)

    def _came(self, replica: str, layers: int, now_us: float) -> Iterator[LayerSpan]:
        load = self._loads.get(replica)
        if load is None or layers <= load.layers:
            return
        first, last = max(0, load.layers), layers - 1
        name = f"layers {first} to {last}" if last > first else f"layer {last}"
        if last < first:
            name = "embedding"
        self._loads[replica] = _Load(now_us, layers)
        yield LayerSpan(f"{replica} gets", name, load.since_us, {"layers_ready": layers})

    def _complete(self, replica: str, now_us: float) -> Iterator[LayerSpan]:
        load = self._loads.pop(replica, None)
        if load is not None and load.since_us < now_us:
            yield LayerSpan(f"{replica} gets", "head", load.since_us, {})

    def _request(self, payload: Payload, state: ClusterState, now_us: float) -> Iterator[LayerSpan]:
        match payload:
            case ev.PrefillStarted(request_id=request_id, replica=replica):
                if state.replicas[replica].state is ReplicaState.NEW_PREFILL:
                    self._begin(request_id, replica, 0, now_us)
            case ev.RequestRelayed(request_id=request_id, layers=layers):
                yield from self._end(request_id, layers)
                self._begin(request_id, state.requests[request_id].runner[0], layers, now_us)
            case (
                ev.PrefillFinished(request_id=request_id)
                | ev.RequestFinished(request_id=request_id)
            ):
                yield from self._end(request_id, None)
            case _ if isinstance(payload, LEFT):
                yield from self._end(payload.request_id, None, left=True)

    def _begin(self, request_id: int, replica: str, first: int, now_us: float) -> None:
        lanes = self._lanes.setdefault(replica, [])
        if None not in lanes:
            lanes.append(None)
        lane = lanes.index(None)
        lanes[lane] = request_id
        self._parts[request_id] = _Part(replica, lane, first, now_us)

    def _end(self, request_id: int, last: int | None, left: bool = False) -> Iterator[LayerSpan]:
        part = self._parts.pop(request_id, None)
        if part is None:
            return
        self._lanes[part.replica][part.lane] = None
        if last == 0:
            return  # it was taken over before any layer ran
        layers = f"{part.first} to {'end' if last is None else last - 1}"
        name = f"{request_id}: layers {layers}" + (", broken off" if left else "")
        number = f" #{part.lane + 1}" if part.lane else ""
        args = {"request": request_id, "replica": part.replica, "first": part.first, "last": last}
        args |= {"broken_off": left}
        yield LayerSpan(f"{part.replica} prefills{number}", name, part.begin_us, args)
