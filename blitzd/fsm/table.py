"""The replica machine: every transition a replica can make is a row here.

Theory of operation
-------------------
Two rules hold this file together. Everything that decides which state follows which is
in `ROWS`; and nothing here knows why a transition happens, which is the business of
`control/`, or what else changes with it, which is the business of the fold.

A replica starts Inactive: its worker may run, but holds no weights. A load takes it
through LoadingPrefill or LoadingDecode; when the last layer has arrived it is Prefill, or
AusDecode ("about to be Decode"), which turns into Decode once it accepts KV. Whatever the
state, a dead worker makes the replica Failed, and a new worker (with a new epoch) makes
it Inactive again.

The `transitions` machine is built from the rows and the fold's lookup is compiled from
that machine, so that the drawing, the machine and the fold cannot disagree.
"""

from enum import StrEnum
from typing import NamedTuple

from transitions import Machine


class ReplicaState(StrEnum):
    INACTIVE = "Inactive"
    LOADING_PREFILL = "LoadingPrefill"
    LOADING_DECODE = "LoadingDecode"
    PREFILL = "Prefill"
    AUS_DECODE = "AusDecode"
    DECODE = "Decode"
    FAILED = "Failed"


class Row(NamedTuple):
    number: int
    """The transition's number in the original's table (reference 1.3); 0 for ours."""
    trigger: str
    source: ReplicaState
    dest: ReplicaState


S = ReplicaState

ROWS: tuple[Row, ...] = (
    Row(1, "load_prefill", S.INACTIVE, S.LOADING_PREFILL),
    Row(2, "load_decode", S.INACTIVE, S.LOADING_DECODE),
    Row(4, "loaded", S.LOADING_PREFILL, S.PREFILL),
    Row(5, "loaded", S.LOADING_DECODE, S.AUS_DECODE),
    Row(7, "open", S.AUS_DECODE, S.DECODE),
    Row(0, "load_failed", S.LOADING_PREFILL, S.INACTIVE),
    Row(0, "load_failed", S.LOADING_DECODE, S.INACTIVE),
    Row(0, "attach", S.FAILED, S.INACTIVE),
    Row(0, "attach", S.INACTIVE, S.INACTIVE),
    *(Row(0, "lose", state, S.FAILED) for state in S if state is not S.FAILED),
    Row(0, "lose", S.FAILED, S.FAILED),
)


class IllegalTransition(Exception):
    """The table has no row for this trigger in this state. Nothing was changed."""

    def __init__(self, subject: str, state: str, trigger: str, accepted: list[str]) -> None:
        super().__init__(
            f"{subject} is {state}: it does not take {trigger!r}"
            f" (it takes {', '.join(sorted(accepted)) or 'nothing'})"
        )


def build_machine() -> Machine:
    """The `transitions` machine of one replica, without a model attached."""
    machine = Machine(
        model=None,
        states=[state.value for state in ReplicaState],
        initial=S.INACTIVE.value,
        auto_transitions=False,
    )
    for row in ROWS:
        machine.add_transition(row.trigger, row.source.value, row.dest.value)
    return machine


def compile_machine(machine: Machine) -> dict[tuple[ReplicaState, str], ReplicaState]:
    """(state, trigger) -> next state, read out of the machine: a hundred times faster to
    fold with than triggering it (reference: feasibility 6)."""
    return {
        (ReplicaState(source), trigger): ReplicaState(transition.dest)
        for trigger, event in machine.events.items()
        for source, transitions in event.transitions.items()
        for transition in transitions
        if transition.dest is not None
    }


TRANSITIONS = compile_machine(build_machine())


def next_state(subject: str, state: ReplicaState, trigger: str) -> ReplicaState:
    """The state that follows. Raises IllegalTransition when the table has no such row."""
    try:
        return TRANSITIONS[state, trigger]
    except KeyError:
        accepted = [known for source, known in TRANSITIONS if source is state]
        raise IllegalTransition(subject, state, trigger, accepted) from None
