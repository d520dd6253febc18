"""A model without arithmetic: its KV cache remembers which token was written where, and its
next token is a digest of everything that it can read back. A block that was shared, moved or
reused wrongly shows as a KV entry that does not belong."""

import hashlib
from collections.abc import Callable

from blitzd.sched import Finish, Reservation, Scheduler, Sequence, StepPlan

VOCABULARY = 50_000


def next_token(tokens: list[int]) -> int:
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=4).digest()
    return int.from_bytes(digest) % VOCABULARY


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class VirtualModel:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.size = scheduler.blocks.block_tokens
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def write(self, blocks: list[int] | tuple[int, ...], tokens: list[int], end: int) -> None:
        """Fills the KV of positions [0, end), as an import from another replica does."""
        for position in range(end):
            self._put(blocks[position // self.size], position, tokens)

    def _put(self, block: int, position: int, tokens: list[int]) -> None:
        # KV of a position depends on every token before it.
        self.slots[block, position % self.size] = tuple(tokens[: position + 1])

    def run(self, plan: StepPlan) -> list[int]:
        assert plan.tokens <= self.scheduler.max_batch_tokens
        assert len(plan.chunks) <= self.scheduler.max_batch_size
        written: set[tuple[int, int]] = set()
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert chunk.count > 0 and chunk.start == sequence.computed
            for position in range(chunk.start, chunk.start + chunk.count):
                block = sequence.blocks[position // self.size]
                assert (block, position % self.size) not in written, "two writers of one slot"
                assert self.scheduler.blocks.references(block) == 1, "a shared block is written"
                written.add((block, position % self.size))
                self._put(block, position, sequence.tokens)
        return [self._sample(chunk.sequence) for chunk in plan.sampling]

    def _sample(self, sequence: Sequence) -> int:
        for position in range(len(sequence.tokens)):
            block = sequence.blocks[position // self.size]
            kv = self.slots.get((block, position % self.size))
            assert kv == tuple(sequence.tokens[: position + 1]), (
                f"sequence {sequence.id}: KV of position {position} is not its own"
            )
        return next_token(sequence.tokens)

    def step(
        self, stops: Callable[[Sequence, int], bool] = lambda s, t: False
    ) -> list[tuple[Sequence, int, Finish]]:
        """One step. Returns (sequence, new token, what it means) for each token made."""
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return []
        sampled = self.run(plan)
        rows = [chunk.sequence for chunk in plan.sampling]
        stopped = {s.id for s, token in zip(rows, sampled, strict=True) if stops(s, token)}
        finishes = self.scheduler.complete(plan, sampled, stopped)
        return list(zip(rows, sampled, finishes, strict=True))

    def adopt(self, reservation: Reservation, sequence: Sequence) -> None:
        computed = len(sequence.tokens) - 1
        self.write(reservation.blocks, sequence.tokens, computed)
        self.scheduler.adopt(reservation, sequence, computed)
