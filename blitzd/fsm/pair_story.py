"""The life of a live pair, from the log: when layers came, and which side had a request when."""

import msgspec

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.state import ClusterState
from blitzd.fsm.story import ENDS
from blitzd.fsm.timeline import Timeline
from blitzd.fsm.trace_layers import LayerSpans


class Part(msgspec.Struct):
    """What one side ran of a request: layers [first, last)."""

    side: str
    """new or old."""
    first: int
    last: int | None
    """None: to the end."""
    begin_us: float
    end_us: float
    broken_off: bool = False
    """It did not come to `last`: it is begun anew elsewhere, or is over."""


class PairRequest(msgspec.Struct):
    id: int
    asked_us: float
    parts: list[Part] = []


class PairStory(msgspec.Struct):
    """Times are microseconds since the pair opened; negative: before."""

    id: int
    new: str = ""
    old: str = ""
    end: str = ""
    """settled, why it broke, or empty: it is still open."""
    end_us: float = 0.0
    layers_us: list[float] = []
    """When so many layers and one more were there."""
    requests: list[PairRequest] = []
    """By id; those that a side began while it was open."""


class PairTeller:
    def __init__(self, pair_id: int) -> None:
        self.story = PairStory(pair_id)
        self.known_ids: list[int] = []
        """The first and the last pair of the log."""
        self._spans = LayerSpans()
        self._timeline = Timeline()
        self._opened_us = 0.0
        self._asked: dict[int, float] = {}
        self._requests: dict[int, PairRequest] = {}

    def see(self, record: Record, state: ClusterState) -> bool:
        """Takes the next record, which is folded into `state`. False: the story is told."""
        now_us = self._timeline.at(record) / 1000
        payload, story = record.payload, self.story
        match payload:
            case ev.PairOpened():
                self.known_ids = [*self.known_ids[:1], payload.pair_id]
                if payload.pair_id == story.id:
                    story.new, story.old, self._opened_us = payload.new, payload.old, now_us
            case ev.RequestAccepted():
                self._asked[payload.request_id] = now_us
            case ev.PairSettled(pair_id=story.id):
                self._end("settled", now_us)
            case ev.PairBroken(pair_id=story.id):
                self._end(payload.reason, now_us)
            case ev.LoadProgressed() if payload.replica == story.new and not story.end:
                new_layers = payload.layers_ready - len(story.layers_us)
                story.layers_us += [now_us - self._opened_us] * new_layers
        for span in self._spans.take(record, state, now_us):
            self._part(span.args, span.begin_us - self._opened_us, now_us - self._opened_us)
        if type(payload) in ENDS:
            self._asked.pop(payload.request_id, None)  # type: ignore[attr-defined]
        return not story.end or bool(self._spans.open)

    def _end(self, how: str, now_us: float) -> None:
        self.story.end, self.story.end_us = how, now_us - self._opened_us

    def _part(self, args: dict[str, object], begin_us: float, end_us: float) -> None:
        story, request_id = self.story, args.get("request")
        sides = {story.new: "new", story.old: "old"}
        side = sides.get(str(args.get("replica")), "")
        within = 0 <= begin_us <= (story.end_us if story.end else begin_us)
        if not side or not within or not isinstance(request_id, int):
            return
        one = self._requests.get(request_id)
        if one is None:
            asked_us = self._asked.get(request_id, self._opened_us) - self._opened_us
            one = self._requests[request_id] = PairRequest(request_id, asked_us)
            story.requests.append(one)
            story.requests.sort(key=lambda request: request.id)
        first, last = args["first"], args["last"]
        assert isinstance(first, int) and isinstance(last, int | None)
        one.parts.append(Part(side, first, last, begin_us, end_us, bool(args["broken_off"])))
