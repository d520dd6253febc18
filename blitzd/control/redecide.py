"""Deciding a recorded log again: the same inputs must give the same events.

A log holds only the inputs that led to something, each right before its events. Inputs of
another core version are folded without being decided again, since a changed decision is
not a defect of the log.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from blitzd.control.core import CORE_VERSION, Core
from blitzd.events.record import Kind, Record
from blitzd.events.types import Booted, RequestFailed, RequestMoving, RequestResumed
from blitzd.fsm import ClusterState
from blitzd.fsm.replaying import replay


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where deciding again gave something else."""

    seq: int
    field: str
    """"record" when one side has a record that the other has not."""
    recorded: str
    decided: str

    def __str__(self) -> str:
        return f"record {self.seq}, {self.field}: {self.recorded} recorded, {self.decided} decided"


@dataclass(slots=True)
class Redecided:
    turns: int = 0
    """Inputs decided again."""
    skipped: int = 0
    """Inputs of other core versions, folded only."""
    difference: Difference | None = None


def redecide(records: Iterable[Record], state: ClusterState | None = None) -> Redecided:
    """Up to the first difference. `state` is that before the first record: none, or a
    snapshot's. Raises what the fold refuses, and HashDiffers for turns it only folds."""
    result = Redecided()
    core = Core(state or ClusterState())
    version = core.state.node.core_version
    for turn in _turns(records):
        cause = turn[0].payload
        if isinstance(cause, Booted):
            version = cause.core_version
        if version != CORE_VERSION:
            result.skipped += 1
            replay(core.state, turn)
            continue
        result.turns += 1
        step = core.step(cause, turn[0].mono_ns, turn[0].wall_ns, _sent_in(turn))
        result.difference = _compare(turn, step.records)
        if result.difference is not None:
            break
    return result


def _sent_in(turn: list[Record]) -> Callable[[int], int]:
    """What the driver counted when this turn was decided is in the events that needed it."""
    counted: dict[int, int] = {}
    for event in (record.payload for record in turn):
        if isinstance(event, RequestResumed | RequestFailed | RequestMoving):
            known = counted.get(event.request_id, 0)
            counted[event.request_id] = max(known, event.output_tokens)
    return lambda request_id: counted.get(request_id, 0)


def _turns(records: Iterable[Record]) -> Iterator[list[Record]]:
    turn: list[Record] = []
    for record in records:
        if record.payload.kind is Kind.INPUT and turn:
            yield turn
            turn = []
        turn.append(record)
    if turn:
        yield turn


def _compare(recorded: list[Record], decided: list[Record]) -> Difference | None:
    for old, new in zip(recorded, decided, strict=False):
        if type(old.payload) is not type(new.payload):
            names = type(old.payload).__name__, type(new.payload).__name__
            return Difference(old.seq, "type", *names)
        for name in ("seq", "cause"):
            if getattr(old, name) != getattr(new, name):
                return Difference(old.seq, name, str(getattr(old, name)), str(getattr(new, name)))
        for name in old.payload.__struct_fields__:
            was, now = getattr(old.payload, name), getattr(new.payload, name)
            if was != now:
                return Difference(old.seq, name, repr(was), repr(now))
    if len(recorded) != len(decided):
        longer = max(recorded, decided, key=len)
        extra = longer[min(len(recorded), len(decided))]
        kind = type(extra.payload).__name__
        sides = (kind, "nothing") if longer is recorded else ("nothing", kind)
        return Difference(extra.seq, "record", *sides)
    return None
