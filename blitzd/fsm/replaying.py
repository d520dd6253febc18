"""A recorded log folded with its own checks, as fast as the fold goes."""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from blitzd.events.record import Record
from blitzd.events.snapshot import Snapshot
from blitzd.events.types import StateHashed
from blitzd.fsm.fold import fold
from blitzd.fsm.folding import FOLDERS
from blitzd.fsm.state import ClusterState

State = TypeVar("State", bound=ClusterState)


class HashDiffers(Exception):
    """The log says that its writer's state was another one than its records give."""

    def __init__(self, seq: int, recorded: str, folded: str) -> None:
        super().__init__(
            f"record {seq} says that the state's hash was {recorded}, the records before it"
            f" give {folded}"
        )
        self.seq = seq


def replay(state: ClusterState, records: Iterable[Record]) -> None:
    """Folds `records` in order, each hash among them checked.

    `state` is that of all records before. Raises HashDiffers, IllegalEvent or
    IllegalTransition, and then `state` is as before the record that is at fault.
    """
    folders = FOLDERS
    last: Record | None = None
    try:
        for record in records:
            payload = record.payload
            kind = type(payload)
            folder = folders.get(kind)
            if folder is not None:
                folder(state, payload, record)
            elif kind is StateHashed:
                check_hash(state, record)
            last = record
    finally:
        if last is not None:
            state.seq, state.mono_ns = last.seq, last.mono_ns


def replay_one(state: ClusterState, record: Record) -> None:
    """As `replay`, for those who look at the state between records."""
    check_hash(state, record)
    fold(state, record)


def check_hash(state: ClusterState, record: Record) -> None:
    """Raises HashDiffers if `record` holds a hash that is not the state's."""
    payload = record.payload
    if type(payload) is StateHashed and payload.state_hash != state.hash():
        raise HashDiffers(record.seq, payload.state_hash, state.hash())


def state_of(snapshot: Snapshot, into: type[State]) -> State:
    """Raises ValueError when it holds no state, or another than its hash says."""
    try:
        state = into.decode(snapshot.state)
    except msgspec.MsgspecError as error:
        raise ValueError(f"snapshot {snapshot.seq} does not hold a state: {error}") from error
    if (state.seq, state.hash()) != (snapshot.seq, snapshot.state_hash):
        raise ValueError(
            f"snapshot {snapshot.seq} says that its state's hash is {snapshot.state_hash}, it is"
            f" {state.hash()} at record {state.seq}"
        )
    return state
