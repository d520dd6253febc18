"""The story of one request: when each thing happened to it, over which links its KV went,
what led to what, and how it ended."""

from typing import Any

import msgspec

from blitzd.events import types as ev
from blitzd.events.json_form import record_json
from blitzd.events.record import Kind, Payload, Record
from blitzd.fsm.link import Lease
from blitzd.fsm.request import RequestState
from blitzd.fsm.state import ClusterState
from blitzd.fsm.timeline import Timeline


class Milestone(msgspec.Struct, frozen=True):
    seq: int
    cause: int
    wall_ns: int
    since_ms: float
    """Since the request's first record in the log."""
    event: str
    state: str
    """Of the request after it."""
    replica: str
    """ID/EPOCH of who the event is about, or empty."""
    detail: dict[str, Any]


class Hop(msgspec.Struct):
    """One attempt to move the KV."""

    lease_id: int
    source: str
    target: str
    blocks: int
    opened_seq: int
    """0: before the log begins."""
    closed_seq: int = 0
    outcome: str = "open"
    """open, arrived, or what stopped it: no_room, source, target, deadline, protocol, that
    the request was resumed, or its end."""
    reason: str = ""
    bytes_moved: int = 0
    transfer_ms: float = 0.0
    """As the target measured it; 0 where its first tokens came before its answer."""
    lease_ms: float = 0.0
    """From the decision to the end of the lease."""
    rest: str = ""
    """Who gave the layers from `split_layer` on, of KV that lay on two replicas."""
    split_layer: int = 0


class Cause(msgspec.Struct, frozen=True):
    """A link of the chain from the end back to what came from outside."""

    seq: int
    kind: str
    type: str
    payload: dict[str, Any]


class Story(msgspec.Struct):
    request_id: int
    state: str = ""
    """The end it had, or where it is."""
    why: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0
    seed: int = 0
    output_tokens: int = 0
    output_digest: str = ""
    begun_before_log: bool = False
    phases_ms: dict[str, float] = {}
    """Time spent in each state, and `total`."""
    milestones: list[Milestone] = []
    hops: list[Hop] = []
    causes: list[Cause] = []
    """Of the last milestone: itself, its cause, and so on."""


ENDS: dict[type[Payload], RequestState] = {
    ev.RequestFinished: RequestState.FINISHED,
    ev.RequestFailed: RequestState.FAILED,
    ev.RequestCancelled: RequestState.CANCELLED,
    ev.RequestRejected: RequestState.REJECTED,
}


class Storyteller:
    """Give it each record after it was folded; `story` is complete up to there."""

    def __init__(self, request_id: int, state: ClusterState) -> None:
        self.story = Story(request_id)
        self.known_ids: tuple[int, int] | None = None
        """The first and the last request seen, for who asks for one that is not there."""
        self._state = state
        self._timeline = Timeline()
        self._began_ns: int | None = None
        self._phase = ""
        self._phase_ns = 0
        self._input: Record | None = None
        self._hops: dict[int, Hop] = {}
        self._opened_ns: dict[int, int] = {}
        request = state.requests.get(request_id)
        if request is not None:
            self.story.begun_before_log = True
            self._describe(request.prompt_tokens, request.max_tokens, request.seed)
            self._phase = self.story.state = request.state.value
            lease = state.leases.get(request.lease_id)
            if lease is not None:
                source = f"{lease.source}/{lease.source_epoch}"
                target = f"{lease.target}/{lease.target_epoch}"
                hop = Hop(lease.id, source, target, request.target_blocks, 0)
                _split(hop, lease)
                self._hops[lease.id], self._opened_ns[lease.id] = hop, 0
                self.story.hops.append(hop)

    def see(self, record: Record) -> None:
        now_ns = self._timeline.at(record)
        payload = record.payload
        if payload.kind is Kind.INPUT:
            self._input = record
        if type(payload) is ev.RequestArrived:
            first = self.known_ids[0] if self.known_ids else payload.request_id
            self.known_ids = first, payload.request_id
        if self._is_about(payload) and payload.kind is Kind.EVENT:
            self._milestone(record, now_ns)

    def _is_about(self, payload: Payload) -> bool:
        wanted = self.story.request_id
        return (
            getattr(payload, "request_id", None) == wanted
            or getattr(payload, "lease_id", None) in self._hops
            or wanted in getattr(payload, "request_ids", ())
        )

    def _milestone(self, record: Record, now_ns: int) -> None:
        payload, story = record.payload, self.story
        if self._began_ns is None:
            self._began_ns = self._phase_ns = now_ns
        if isinstance(payload, ev.RequestAccepted):
            self._describe(payload.prompt_tokens, payload.max_tokens, payload.seed)
        self._follow_hops(record, now_ns)
        self._change_phase(payload, now_ns)
        detail = record_json(record)["payload"]
        replica = getattr(payload, "replica", "")
        if replica:
            replica = f"{replica}/{getattr(payload, 'epoch', 0)}"
        since_ms = (now_ns - self._began_ns) / 1e6
        named = (record.seq, record.cause, record.wall_ns, since_ms, type(payload).__name__)
        story.milestones.append(Milestone(*named, story.state, replica, detail))
        story.phases_ms["total"] = since_ms
        story.causes = self._chain(record)

    def _describe(self, prompt_tokens: int, max_tokens: int, seed: int) -> None:
        story = self.story
        story.prompt_tokens, story.max_tokens, story.seed = prompt_tokens, max_tokens, seed

    def _follow_hops(self, record: Record, now_ns: int) -> None:
        payload = record.payload
        if isinstance(payload, ev.MigrationStarted):
            source = f"{payload.source}/{payload.source_epoch}"
            target = f"{payload.target}/{payload.target_epoch}"
            hop = Hop(payload.lease_id, source, target, payload.blocks, record.seq)
            _split(hop, payload)
            self._hops[payload.lease_id] = hop
            self._opened_ns[payload.lease_id] = now_ns
            self.story.hops.append(hop)
        elif isinstance(payload, ev.MigrationFinished):
            hop = self._close(payload.lease_id, record.seq, now_ns, "arrived")
            hop.bytes_moved, hop.transfer_ms = payload.bytes_moved, payload.elapsed_ns / 1e6
        elif isinstance(payload, ev.MigrationFailed):
            hop = self._close(payload.lease_id, record.seq, now_ns, payload.fault)
            hop.reason = payload.reason
        elif type(payload) in ENDS or isinstance(payload, ev.RequestResumed):
            outcome = str(ENDS.get(type(payload), "resumed"))
            for lease_id, hop in self._hops.items():
                if hop.outcome == "open":
                    self._close(lease_id, record.seq, now_ns, outcome)

    def _close(self, lease_id: int, seq: int, now_ns: int, outcome: str) -> Hop:
        hop = self._hops[lease_id]
        hop.closed_seq, hop.outcome = seq, outcome
        hop.lease_ms = (now_ns - self._opened_ns[lease_id]) / 1e6
        return hop

    def _change_phase(self, payload: Payload, now_ns: int) -> None:
        story = self.story
        end = ENDS.get(type(payload))
        if end is not None:
            after = end.value
            story.why = _why(payload)
            story.output_tokens = getattr(payload, "output_tokens", 0)
            story.output_digest = getattr(payload, "output_digest", "")
        else:
            after = self._state.requests[story.request_id].state.value
        if self._phase:
            spent = story.phases_ms.get(self._phase, 0.0)
            story.phases_ms[self._phase] = spent + (now_ns - self._phase_ns) / 1e6
        self._phase = "" if end is not None else after
        self._phase_ns = now_ns
        story.state = after

    def _chain(self, record: Record) -> list[Cause]:
        """Inputs come from outside, so no chain is longer than an event and its input."""
        chain = [record]
        if self._input is not None and record.cause == self._input.seq:
            chain.append(self._input)
        shown = map(record_json, chain)
        return [Cause(r["seq"], r["kind"], r["type"], r["payload"]) for r in shown]


def _split(hop: Hop, halves: ev.MigrationStarted | Lease) -> None:
    if halves.rest:
        hop.rest, hop.split_layer = f"{halves.rest}/{halves.rest_epoch}", halves.split_layer


def _why(end: Payload) -> str:
    if isinstance(end, ev.RequestFinished):
        return end.finish
    code = getattr(end, "code", "")
    reason: str = getattr(end, "reason", "")
    return f"{code}: {reason}" if code else reason
