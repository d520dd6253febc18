"""The state that a log on disk holds: a snapshot, and what was recorded after it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import structlog

from blitzd.events import LogError, LogReader, OsDisk, Record
from blitzd.events.snapshot import read_snapshot, snapshot_path, snapshot_seqs
from blitzd.fsm import ClusterState, fold
from blitzd.fsm.replaying import HashDiffers, replay, state_of

log = structlog.get_logger()

State = TypeVar("State", bound=ClusterState)


Notice = Callable[[str], None]
"""Told of each snapshot that is passed over, and why."""


def newest_state(
    directory: Path, into: type[State], notice: Notice, at_most: int | None = None
) -> State | None:
    """Of the newest snapshot in `directory` (the log's) that is whole and has a sequence up
    to `at_most`."""
    seqs = snapshot_seqs(OsDisk(), directory)
    wanted = [seq for seq in reversed(seqs) if at_most is None or seq <= at_most]
    return _first_whole(directory, wanted, into, notice)


def oldest_state(directory: Path, into: type[State], notice: Notice, at_least: int) -> State | None:
    """Of the oldest whole snapshot with a sequence of `at_least` or more."""
    seqs = snapshot_seqs(OsDisk(), directory)
    return _first_whole(directory, [seq for seq in seqs if seq >= at_least], into, notice)


def _first_whole(
    directory: Path, seqs: Iterable[int], into: type[State], notice: Notice
) -> State | None:
    for seq in seqs:
        path = snapshot_path(directory, seq)
        try:
            return state_of(read_snapshot(OsDisk(), path), into)
        except ValueError as error:
            notice(f"{path} is passed over: {error}")
    return None


def restore(state_dir: Path) -> ClusterState:
    """What a daemon starts from. Raises LogError, and what the fold refuses.

    A hash in the log that differs is reported and no reason to refuse: the state is what the
    log gives, and the process that had another one has ended.
    """
    reader = LogReader(state_dir)
    state = newest_state(reader.directory, ClusterState, log.warning) or ClusterState()
    if reader.first_seq > state.seq + 1:
        raise LogError(
            f"{reader.directory}: the log begins at record {reader.first_seq}, and no snapshot"
            f" that can be read covers the {reader.first_seq - 1} records before it"
        )
    for batch in reader.batches(state.seq + 1):
        _fold(state, batch)
    return state


def _fold(state: ClusterState, records: list[Record]) -> None:
    while records:
        try:
            replay(state, records)
            return
        except HashDiffers as difference:
            log.error("the log's state is not what its writer had", reason=str(difference))
            [at] = [i for i, record in enumerate(records) if record.seq == difference.seq]
            fold(state, records[at])
            records = records[at + 1 :]
