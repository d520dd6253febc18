"""A running daemon's log, line by line, with what each event did to the replicas."""

import sys
from collections import deque
from typing import Any

import msgspec

from blitzd.cli.log_source import LogSource
from blitzd.cli.replay_text import as_line
from blitzd.events.json_form import record_json
from blitzd.events.record import Record
from blitzd.fsm.timeline import Timeline
from blitzd.fsm.watched import WatchedState

LINES_BEFORE = 10
"""Of what is there already, as `tail -f` does."""


def follow_log(source: LogSource, json: bool) -> None:
    """Until it is interrupted. Raises what reading and folding raise."""
    state = source.begin(WatchedState)
    follower = _Follower(state, json)
    recent: deque[str] = deque(maxlen=LINES_BEFORE)
    with source.bar("folding"):
        for record in source.records(state):
            recent.append(follower.line(record))
    sys.stdout.write("".join(recent))
    sys.stdout.flush()
    for batch in source.reader.follow(state.seq + 1, stop=lambda: False):
        sys.stdout.write("".join(map(follower.line, batch)))
        sys.stdout.flush()


class _Follower:
    def __init__(self, state: WatchedState, json: bool) -> None:
        self._state = state
        self._json = json
        self._timeline = Timeline()

    def line(self, record: Record) -> str:
        since_ns = self._timeline.at(record)
        before = {name: replica.state for name, replica in self._state.replicas.items()}
        moves: list[dict[str, Any]] = []
        for kind, name in self._state.take(record):
            after = self._state.replicas.get(str(name)) if kind == "replica" else None
            if after is not None and before.get(str(name)) is not after.state:
                was = before[str(name)].value if str(name) in before else ""
                moves.append({"replica": name, "from": was, "to": after.state.value})
        if self._json:
            return msgspec.json.encode(record_json(record) | {"moves": moves}).decode() + "\n"
        return as_line(record, since_ns, moves) + "\n"
