"""The replica machine: every transition a replica can make is a row here.

Theory of operation
-------------------
Two rules hold this file together. Everything that decides which state follows which is
in `ROWS`; and nothing here knows why a transition happens, which is the business of
`control/`, or what else changes with it, which is the business of the fold.

*Coming up.* A replica starts Inactive: its worker may run, but holds no weights. A load
takes it through LoadingPrefill or LoadingDecode. When the last layer has arrived it is
Prefill, or AusDecode ("about to be Decode"), which turns into Decode once it accepts KV.
A replica that is to do both ends its load as Colocated.

*Live.* Instead of waiting for its weights, a replica may become NewPrefill and serve with
the layers it has, paired with an OldPrefill that finishes what the new one cannot. When
the last layer has arrived it is RefactoryPrefill until what was begun in pairs has ended;
then both are Prefill. A pair moves as one: no event leaves half of it behind.

*Changing roles.* A Prefill becomes MutatingToDecode, takes no prompts any more, and is
Decode once those it has are computed; their KV stays where it is. A Decode becomes
AusPrefill, takes no KV any more, and is Prefill once what it decodes has ended.

*Going down.* ShuttingPrefill and ShuttingDecode finish what they have and take nothing
new; either may be revived. Empty, they are ShuttingNull: warm, with weights and no work. A
Decode that is idle anyway gets there at once. A null serves again at once, in either role,
or gives up its weights and is Inactive.

*Guards.* The original guards each replica's KV with a mutex. Here the guard is derived:
what may enter a replica follows from its state (`ACCEPTS_PROMPTS`, `ACCEPTS_KV`), and
AusDecode, AusPrefill, MutatingToDecode and the Shutting states are left when the requests
and leases they wait for are gone.

*Restarting.* A worker that has nothing to do, be its replica ShuttingNull, Inactive or still
loading, is stopped; the replica is Inactive, and its next worker (with a new epoch) takes
it through a load again.

*Death.* Whatever the state, a dead worker makes the replica Failed, and a new worker (with
a new epoch) makes it Inactive again. So does one of whom a restarted controller cannot know
yet whether it lives; one that is found alive, with its weights, is ShuttingNull.

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
    NEW_PREFILL = "NewPrefill"
    REFACTORY_PREFILL = "RefactoryPrefill"
    OLD_PREFILL = "OldPrefill"
    AUS_PREFILL = "AusPrefill"
    PREFILL = "Prefill"
    AUS_DECODE = "AusDecode"
    DECODE = "Decode"
    MUTATING_TO_DECODE = "MutatingToDecode"
    SHUTTING_PREFILL = "ShuttingPrefill"
    SHUTTING_DECODE = "ShuttingDecode"
    SHUTTING_NULL = "ShuttingNull"
    COLOCATED = "Colocated"
    FAILED = "Failed"

    @classmethod
    def _missing_(cls, value: object) -> "ReplicaState | None":
        """The original's documents spell one state in two ways."""
        return cls.REFACTORY_PREFILL if value == "RefractoryPrefill" else None


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
    Row(3, "pair_new", S.INACTIVE, S.NEW_PREFILL),
    Row(4, "loaded", S.LOADING_PREFILL, S.PREFILL),
    Row(5, "loaded", S.LOADING_DECODE, S.AUS_DECODE),
    Row(6, "loaded_to_mutate", S.LOADING_DECODE, S.MUTATING_TO_DECODE),
    Row(7, "open", S.AUS_DECODE, S.DECODE),
    Row(8, "open", S.AUS_PREFILL, S.PREFILL),
    Row(9, "pair_old", S.PREFILL, S.OLD_PREFILL),
    Row(10, "loaded", S.NEW_PREFILL, S.REFACTORY_PREFILL),
    Row(11, "settle", S.REFACTORY_PREFILL, S.PREFILL),
    Row(12, "settle", S.OLD_PREFILL, S.PREFILL),
    Row(13, "mutate", S.PREFILL, S.MUTATING_TO_DECODE),
    Row(14, "open", S.MUTATING_TO_DECODE, S.DECODE),
    Row(15, "shut", S.PREFILL, S.SHUTTING_PREFILL),
    Row(16, "revive", S.SHUTTING_PREFILL, S.PREFILL),
    Row(17, "empty", S.SHUTTING_PREFILL, S.SHUTTING_NULL),
    Row(18, "shut", S.DECODE, S.SHUTTING_DECODE),
    Row(19, "revive", S.SHUTTING_DECODE, S.AUS_DECODE),
    Row(20, "empty", S.SHUTTING_DECODE, S.SHUTTING_NULL),
    Row(21, "expire", S.DECODE, S.SHUTTING_NULL),
    # 22, the null taking its guard, is no transition: a null accepts nothing.
    Row(23, "reuse_prefill", S.SHUTTING_NULL, S.PREFILL),
    Row(24, "reuse_decode", S.SHUTTING_NULL, S.DECODE),
    Row(25, "reuse_as_decode", S.SHUTTING_NULL, S.AUS_DECODE),
    Row(26, "deactivate", S.SHUTTING_NULL, S.INACTIVE),
    # 27, deactivation after a time, is 26 for another reason; 28 are manual causes of others.
    Row(0, "mutate", S.DECODE, S.AUS_PREFILL),
    Row(0, "load_colocated", S.INACTIVE, S.LOADING_PREFILL),
    Row(0, "loaded_colocated", S.LOADING_PREFILL, S.COLOCATED),
    Row(0, "shut", S.COLOCATED, S.SHUTTING_DECODE),
    Row(0, "revive_colocated", S.SHUTTING_DECODE, S.COLOCATED),
    Row(0, "reuse_colocated", S.SHUTTING_NULL, S.COLOCATED),
    Row(0, "load_failed", S.LOADING_PREFILL, S.INACTIVE),
    Row(0, "load_failed", S.LOADING_DECODE, S.INACTIVE),
    Row(0, "load_failed", S.NEW_PREFILL, S.INACTIVE),
    *(
        Row(0, "stop", state, S.INACTIVE)
        for state in (
            S.INACTIVE,
            S.FAILED,
            S.LOADING_PREFILL,
            S.LOADING_DECODE,
            S.SHUTTING_NULL,
        )
    ),
    Row(0, "attach", S.FAILED, S.INACTIVE),
    Row(0, "adopt", S.FAILED, S.SHUTTING_NULL),
    Row(0, "attach", S.INACTIVE, S.INACTIVE),
    *(Row(0, "lose", state, S.FAILED) for state in S),
)

ACCEPTS_PROMPTS = frozenset({S.PREFILL, S.NEW_PREFILL, S.OLD_PREFILL, S.COLOCATED})
ACCEPTS_KV = frozenset({S.DECODE, S.COLOCATED})
LOADING = frozenset({S.LOADING_PREFILL, S.LOADING_DECODE, S.NEW_PREFILL})
WITHOUT_WEIGHTS = frozenset({S.INACTIVE, S.FAILED})


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
