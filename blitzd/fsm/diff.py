"""What changed between two points of a log, field by field, and the events that did it."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from blitzd.events.record import Record
from blitzd.fsm.state import ClusterState, Key
from blitzd.fsm.watched import WatchedState

EVENTS_KEPT = 8
"""Of a field that changes all the time, only the newest are of interest."""


class Change(msgspec.Struct, frozen=True):
    entity: str
    """node, plan, topology, agent, replica, request, lease, link or pair."""
    key: str | int
    field: str
    """Empty: the whole entity came or went."""
    before: Any
    """None: the entity was not there."""
    after: Any
    events: tuple[int, ...]
    """Sequences of the last EVENTS_KEPT events that changed it."""
    event_count: int


@dataclass(slots=True)
class _Marks:
    """Who changed one thing."""

    count: int = 0
    newest: deque[int] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def add(self, seq: int) -> None:
        self.count += 1
        self.newest.append(seq)


@dataclass(slots=True)
class _Tracked:
    values: dict[str, Any] | None
    """As they were last seen; None: not there."""
    marks: dict[str, _Marks] = field(default_factory=dict)


class Differ:
    """Begins at the point that `state` is at; `take` moves it on."""

    def __init__(self, state: WatchedState) -> None:
        self.state = state
        self.passed: Counter[str] = Counter()
        """Entities that came and went in between, by kind."""
        self._before = ClusterState.decode(state.encode())
        self._tracked: dict[Key, _Tracked] = {}

    def take(self, record: Record) -> None:
        """Raises what the fold raises."""
        for key in self.state.take(record):
            tracked = self._tracked.get(key)
            if tracked is None:
                tracked = self._tracked[key] = _Tracked(_values(self._before, key))
            now = _values(self.state, key)
            _mark(tracked, now, record.seq)
            if now is None and self._before.entity(*key) is None:
                # Requests come and go by the million; what left no trace is only counted.
                del self._tracked[key]
                self.passed[key[0]] += 1

    def changes(self) -> list[Change]:
        """Entities in order of kind and key, fields as they are declared."""
        found: list[Change] = []
        for key, tracked in sorted(self._tracked.items(), key=lambda item: _order(item[0])):
            before, after = _values(self._before, key), tracked.values
            if before is None or after is None:
                if before != after:
                    shown = _without_defaults(before), _without_defaults(after)
                    found.append(_change(key, "", *shown, tracked))
                continue
            found += [
                _change(key, name, before[name], after[name], tracked)
                for name in after
                if before[name] != after[name]
            ]
        return found


def _values(state: ClusterState, key: Key) -> dict[str, Any] | None:
    entity = state.entity(*key)
    if entity is None:
        return None
    # The dicts of a node and of the plan are changed in place.
    return {
        name: dict(value) if isinstance(value, dict) else value
        for name, value in msgspec.structs.asdict(entity).items()
    }


def _without_defaults(values: dict[str, Any] | None) -> dict[str, Any] | None:
    return values and {name: value for name, value in values.items() if value not in ("", 0, {})}


def _mark(tracked: _Tracked, now: dict[str, Any] | None, seq: int) -> None:
    was = tracked.values
    if was is None or now is None:
        names = [""] if was is not now else []
    else:
        names = [name for name in now if was[name] != now[name]]
    for name in names:
        tracked.marks.setdefault(name, _Marks()).add(seq)
    tracked.values = now


def _change(key: Key, name: str, before: Any, after: Any, tracked: _Tracked) -> Change:
    marks = tracked.marks.get(name) or tracked.marks.get("") or _Marks()
    return Change(*key, name, before, after, tuple(marks.newest), marks.count)


KINDS = ("node", "plan", "topology", "agent", "replica", "request", "lease", "link", "pair")


def _order(key: Key) -> tuple[int, bool, str | int]:
    kind, name = key
    return KINDS.index(kind), isinstance(name, str), name
