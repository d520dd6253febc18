"""Why a decision came out as it did: the input that led to it and the facts of the state
right before it, among them who could have been chosen and why the others could not.

The facts of placements come from `offers`, which decides on them too.
"""

from typing import Any

import msgspec

from blitzd.control.explain_facts import candidates_of, candidates_of_waiting, facts_of
from blitzd.control.explain_rules import RULES
from blitzd.control.policy import Policy
from blitzd.events.json_form import record_json
from blitzd.events.record import Kind, Record
from blitzd.fsm import ClusterState
from blitzd.fsm.replaying import replay_one


class Candidate(msgspec.Struct, frozen=True):
    replica: str
    state: str
    chosen: bool
    refusal: str
    """Why it could not be chosen; empty: it could."""
    facts: dict[str, Any]


class Explanation(msgspec.Struct):
    record: dict[str, Any]
    """In the form of exports."""
    cause: dict[str, Any] | None
    """The input that led to it; None: the record is an input itself."""
    rule: str
    """What the decision follows, in a sentence."""
    facts: dict[str, Any]
    """What it rested on, right before it."""
    candidates: list[Candidate]
    """Of a decision that chose a replica; else of a request that waits after it, since
    nobody can take it."""
    turn: list[dict[str, Any]]
    """Everything that was decided on the same input: seq and type."""


class Explainer:
    """Give it records in order until the turn of `seq` is complete."""

    def __init__(self, seq: int, state: ClusterState) -> None:
        self._seq = seq
        self._state = state
        self._turn: list[Record] = []
        self._event: Record | None = None
        self._explanation: Explanation | None = None

    def see(self, record: Record) -> bool:
        """Folds `record`; False when it is of a later turn. Raises what the fold raises."""
        if record.payload.kind is Kind.INPUT:
            if self._event is not None:
                return False
            self._turn.clear()
        self._turn.append(record)
        if record.seq == self._seq:
            self._event = record
            self._explanation = self._explain(record)
        replay_one(self._state, record)
        return True

    def finish(self) -> Explanation | None:
        """None when `seq` did not come."""
        found = self._explanation
        if found is None or self._event is None:
            return None
        found.turn = [_named(record) for record in self._turn]
        if not found.candidates:
            policy = Policy.of(self._state.node.policy)
            waiting = candidates_of_waiting(self._state, policy, self._event.payload)
            found.candidates = [Candidate(*shown) for shown in waiting]
        return found

    def _explain(self, record: Record) -> Explanation:
        first = self._turn[0]
        cause = first if record.cause == first.seq else None
        policy = Policy.of(self._state.node.policy)
        return Explanation(
            record_json(record),
            record_json(cause) if cause else None,
            RULES.get(type(record.payload), "This version does not know the record's type."),
            facts_of(self._state, policy, record, cause.payload if cause else None),
            [Candidate(*c) for c in candidates_of(self._state, policy, record.payload)],
            [],
        )


def _named(record: Record) -> dict[str, Any]:
    return {"seq": record.seq, "type": type(record.payload).__name__}
