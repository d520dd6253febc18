"""The replica table: machine, compiled lookup and refusals agree."""

import pytest
from hypothesis import given, strategies as st
from transitions import MachineError

from blitzd.fsm.table import (
    ROWS,
    IllegalTransition,
    ReplicaState,
    build_machine,
    next_state,
)

TRIGGERS = sorted({row.trigger for row in ROWS})


class Subject:
    state: str


@given(st.sampled_from(ReplicaState), st.lists(st.sampled_from(TRIGGERS), max_size=12))
def test_the_fold_follows_the_transitions_machine(start: ReplicaState, triggers: list[str]) -> None:
    machine = build_machine()
    subject = Subject()
    machine.add_model(subject, initial=start.value)
    state = start
    for trigger in triggers:
        try:
            machine.events[trigger].trigger(subject)
        except MachineError:
            with pytest.raises(IllegalTransition):
                next_state("replica r0", state, trigger)
        else:
            state = next_state("replica r0", state, trigger)
        assert subject.state == state.value


def test_no_two_rows_contradict_each_other() -> None:
    assert len({(row.source, row.trigger) for row in ROWS}) == len(ROWS)


def test_a_refusal_says_what_would_be_accepted() -> None:
    with pytest.raises(IllegalTransition) as refusal:
        next_state("replica r7", ReplicaState.DECODE, "loaded")
    assert str(refusal.value) == (
        "replica r7 is Decode: it does not take 'loaded' (it takes expire, lose, mutate, shut)"
    )
