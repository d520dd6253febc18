"""One request inside a replica: its tokens, how many are computed, the blocks they lie in."""

from dataclasses import dataclass, field
from enum import Enum

from blitzd.sched.block_manager import chain


class Phase(Enum):
    WAITING = "waiting"
    """No blocks, nothing computed."""
    RUNNING = "running"
    HELD = "held"
    """Prefilled; keeps its blocks, out of the batch, until released."""
    ENDED = "ended"


class Finish(Enum):
    """What a new token means for its sequence."""

    NONE = "none"
    STOP = "stop"
    LENGTH = "length"
    HELD = "held"


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are the prompt and what was produced since, in order. The KV of positions
    [0, computed) lies in `blocks`; the rest is wanted. While it lives, computed < len(tokens),
    and a step that computes the last wanted position samples the next token."""

    id: int
    tokens: list[int]
    prompt_tokens: int
    """How many of `tokens` are the prompt."""
    max_tokens: int
    """Of output, those that `tokens` brings along included."""
    hold: bool = False
    """Stop after the first new token and keep the KV."""
    uncached: bool = False
    """Compute every position: the prefix cache has KV, but not what a position gave."""
    phase: Phase = Phase.WAITING
    computed: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved when it was first admitted."""
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Of the full blocks of `tokens`, as far as anybody asked."""
    published: int = 0
    """How many of `blocks` have been offered to the prefix cache."""
    preemptions: int = 0

    @property
    def wanted(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def prefix_digests(self, blocks: int, block_tokens: int) -> list[bytes]:
        """Chained digests of the first `blocks` full blocks. Each is computed once."""
        while len(self.digests) < blocks:
            start = len(self.digests) * block_tokens
            parent = self.digests[-1] if self.digests else b""
            self.digests.append(chain(parent, self.tokens[start : start + block_tokens]))
        return self.digests[:blocks]
