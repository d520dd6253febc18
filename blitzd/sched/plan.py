"""What a scheduler hands out, and what it can say no with."""

from dataclasses import dataclass

from blitzd.sched.sequence import Sequence


class Refused(ValueError):
    """The request can never run here. The message names the field and what would fit."""


class NoRoom(Exception):
    """A reservation does not fit now."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """`count` tokens of `sequence` from position `start` on."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """It ends at the last wanted position: a new token comes of it."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def sampling(self) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.samples)

    @property
    def tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Blocks and a place in the batch for a sequence whose KV comes from elsewhere."""

    tokens: int
    blocks: tuple[int, ...]
