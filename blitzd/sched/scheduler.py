"""Iteration-level scheduling: one loop for prompts, chunks of prompts and decodes.

Each `schedule` picks the tokens of one step; `complete` says what came of it. Running
sequences go first, those that want one token before those that want many; then waiting ones
are admitted in order as far as token budget, batch size and KV blocks allow. A sequence is
admitted with blocks for the tokens that it has, not for those that it may produce; when a
running one cannot grow, the newest running one is preempted: it gives up its blocks and
waits, first in line, to be computed again (mostly from the prefix cache).
"""

from collections import deque
from collections.abc import Collection, Sequence as Listing

from blitzd.sched.block_manager import BlockManager, NoFreeBlocks
from blitzd.sched.plan import Chunk, NoRoom, Refused, Reservation, StepPlan
from blitzd.sched.sequence import Finish, Phase, Sequence


class Scheduler:
    """At most one plan is out at a time: `schedule`, then `complete` or `abort`."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        context_tokens: int,
        max_batch_tokens: int,
        max_batch_size: int,
    ) -> None:
        if not 1 <= max_batch_size <= max_batch_tokens:
            raise ValueError(
                f"max_batch_size={max_batch_size}: must be between 1 and "
                f"max_batch_tokens={max_batch_tokens}, so that every running sequence moves"
            )
        self.blocks = blocks
        self.context_tokens = context_tokens
        self.max_batch_tokens = max_batch_tokens
        self.max_batch_size = max_batch_size
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._reservations: set[Reservation] = set()
        self._out: StepPlan | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def held(self) -> int:
        return len(self._sequences) - len(self._running) - len(self._waiting)

    @property
    def reserved(self) -> int:
        return len(self._reservations)

    def get(self, sequence_id: int) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def sequence_ids(self) -> list[int]:
        return list(self._sequences)

    # -- requests in and out ------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues it. Raises Refused when it can never run."""
        self.check(sequence)
        self._sequences[sequence.id] = sequence
        self._waiting.append(sequence)

    def reserve(self, tokens: int) -> Reservation:
        """Takes blocks for `tokens` positions and a place in the batch. Raises NoRoom.

        Nobody is preempted for it: what runs here has gone further than what may come.
        """
        if not self._has_place():
            raise NoRoom(
                f"batch is full: {len(self._running)} running and {len(self._reservations)} "
                f"reserved of {self.max_batch_size}"
            )
        wanted = self.blocks.blocks_for(tokens)
        try:
            taken = self.blocks.take((), wanted)
        except NoFreeBlocks:
            raise NoRoom(
                f"{wanted} KV blocks wanted for {tokens} tokens, {self.blocks.free} of "
                f"{self.blocks.blocks_total} free"
            ) from None
        reservation = Reservation(tokens, tuple(taken))
        self._reservations.add(reservation)
        return reservation

    def give_back(self, reservation: Reservation) -> None:
        """Ends a reservation unused."""
        self._reservations.remove(reservation)
        self.blocks.release(reservation.blocks)

    def adopt(self, reservation: Reservation, sequence: Sequence, computed: int) -> None:
        """Runs a sequence whose KV for [0, computed) now lies in the reservation's blocks.

        The reservation was made for all of its tokens. Raises Refused, and leaves the
        reservation, when it was not or when the sequence can never run. The prefix cache gets
        its blocks when a step has used them: until then nobody knows that what came is sound.
        """
        if len(sequence.tokens) != reservation.tokens or not 0 < computed < reservation.tokens:
            raise Refused(
                f"tokens: {len(sequence.tokens)} of which {computed} are computed; reserved are "
                f"{reservation.tokens}, and at least one must be left to compute"
            )
        self.check(sequence)
        self._reservations.remove(reservation)
        sequence.blocks = list(reservation.blocks)
        sequence.computed = computed
        sequence.phase = Phase.RUNNING
        self._sequences[sequence.id] = sequence
        self._running.append(sequence)

    def keep(self, reservation: Reservation, sequence: Sequence, computed: int) -> None:
        """Holds a sequence for export: KV of [0, computed), of some layers or all, now lies in
        the reservation's blocks. It is not offered to the prefix cache."""
        self._reservations.remove(reservation)
        sequence.blocks = list(reservation.blocks)
        sequence.computed = computed
        sequence.phase = Phase.HELD
        self._sequences[sequence.id] = sequence

    def at_length(self, sequence: Sequence) -> bool:
        """Its last token ends it."""
        return len(sequence.tokens) >= self._length_limit(sequence)

    def release(self, sequence_id: int) -> bool:
        """Ends a held sequence. False when there is none of that id."""
        sequence = self._sequences.get(sequence_id)
        return sequence is not None and sequence.phase is Phase.HELD and self.cancel(sequence_id)

    def hold(self, sequence_id: int) -> bool:
        """Lets a sequence stop after its next new token and keep its KV, as one that was added
        with `hold`. False when there is none of that id. Held already, it stays as it is."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        sequence.hold = True
        return True

    def resume(self, sequence_id: int) -> bool:
        """Lets a held sequence go on here. False when there is none of that id. Raises
        Refused, and it stays held, when its end can never fit.

        With the batch full it gives its blocks up and waits, first in line; most of it comes
        back out of the prefix cache.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.phase is not Phase.HELD:
            return False
        self._check_room(self._length_limit(sequence) - 1)
        sequence.hold = False
        if self._has_place():
            sequence.phase = Phase.RUNNING
            self._running.append(sequence)
        else:
            self._wait_first(sequence)
        return True

    def cancel(self, sequence_id: int) -> bool:
        """Ends a sequence in whatever phase it is. False when there is none of that id.

        If it is part of the plan that is out, its blocks stay taken until that is back.
        """
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return False
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
        sequence.phase = Phase.ENDED
        if not self._is_out(sequence):
            self._free(sequence)
        return True

    def check(self, sequence: Sequence) -> None:
        """Raises Refused when it can never run here."""
        if sequence.id in self._sequences:
            raise Refused(f"request_id: {sequence.id} is here already")
        if sequence.prompt_tokens < 1 or sequence.max_tokens < 1:
            raise Refused(
                f"prompt tokens: {sequence.prompt_tokens}, max_tokens: {sequence.max_tokens}; "
                "both must be at least 1"
            )
        if sequence.output_tokens >= sequence.max_tokens:
            raise Refused(
                f"max_tokens: {sequence.max_tokens}, but {sequence.output_tokens} output tokens "
                "are there already"
            )
        if len(sequence.tokens) >= self.context_tokens:
            raise Refused(
                f"prompt_tokens: {len(sequence.tokens)} tokens, the context of "
                f"{self.context_tokens} leaves room for {self.context_tokens - 1}"
            )
        # The last token of a sequence is never computed: nothing comes after it.
        self._check_room(
            len(sequence.tokens) if sequence.hold else self._length_limit(sequence) - 1
        )

    def _check_room(self, longest: int) -> None:
        if self.blocks.blocks_for(longest) > self.blocks.blocks_total:
            capacity = self.blocks.blocks_total * self.blocks.block_tokens
            raise Refused(
                f"prompt_tokens and max_tokens: KV of {longest} tokens wanted at the end, this "
                f"replica holds {capacity}"
            )

    def _length_limit(self, sequence: Sequence) -> int:
        return min(sequence.prompt_tokens + sequence.max_tokens, self.context_tokens)

    # -- one step -----------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Picks the next step's tokens. Empty when nothing can run now."""
        if self._out is not None:
            raise RuntimeError("schedule: the plan before this one is still out")
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        budget = self.max_batch_tokens
        # A sequence that wants many tokens has had the blocks for them since it came in, so only
        # those that want one can preempt, and they go in order of age: no victim is in `chunks`.
        for sequence in sorted(self._running, key=lambda s: s.wanted > 1):
            if budget == 0:
                break
            if sequence.phase is Phase.RUNNING and self._grow(sequence, preempted):
                budget -= self._add_chunk(chunks, sequence, budget)
        while budget > 0 and self._admit_next():
            budget -= self._add_chunk(chunks, self._running[-1], budget)
        plan = StepPlan(tuple(chunks), tuple(preempted))
        if chunks:
            self._out = plan
        return plan

    @staticmethod
    def _add_chunk(chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        count = min(sequence.wanted, budget)
        chunks.append(Chunk(sequence, sequence.computed, count, count == sequence.wanted))
        return count

    def _grow(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Blocks for all of its tokens, preempting newer ones; False when it was itself the
        newest."""
        missing = self.blocks.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        while missing > self.blocks.free:
            victim = self._running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self.blocks.take((), missing)
        return True

    def _preempt(self, victim: Sequence) -> None:
        victim.preemptions += 1
        self._wait_first(victim)

    def _wait_first(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)

    def _has_place(self) -> bool:
        return len(self._running) + len(self._reservations) < self.max_batch_size

    def _admit_next(self) -> bool:
        """Moves the first waiting sequence to the running ones if it fits as a whole: half a
        prompt that waits for blocks would keep others from them."""
        if not self._waiting:
            return False
        if not self._has_place():
            return False
        sequence = self._waiting[0]
        size = self.blocks.block_tokens
        # At least the last token is computed, since the next one is sampled from it.
        full = 0 if sequence.uncached else (len(sequence.tokens) - 1) // size
        shared = self.blocks.match(sequence.prefix_digests(full, size))
        missing = self.blocks.blocks_for(len(sequence.tokens)) - len(shared)
        try:
            fresh = self.blocks.take(shared, missing)
        except NoFreeBlocks:
            return False
        self._waiting.popleft()
        sequence.blocks = shared + fresh
        sequence.computed = len(shared) * size
        sequence.published = len(shared)
        if sequence.preemptions == 0:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
        sequence.phase = Phase.RUNNING
        self._running.append(sequence)
        return True

    def complete(
        self,
        plan: StepPlan,
        sampled: Listing[int],
        stopped: Collection[int] = (),
        spoilt: Collection[int] = (),
    ) -> list[Finish]:
        """Takes a step's result: one token for each of `plan.sampling`, in order. `stopped`
        are the ids whose new token is their last. Returns what each new token means.

        A sequence cancelled since `schedule` gets Finish.NONE and no token. So does a `spoilt`
        one, which ends; none of its blocks stays in the prefix cache, whoever put it there.
        """
        if plan is not self._out:
            raise RuntimeError("complete: this plan is not the one that is out")
        if len(sampled) != len(plan.sampling):
            raise ValueError(f"sampled: {len(sampled)} tokens for {len(plan.sampling)} rows")
        self._out = None
        tokens = iter(sampled)
        finishes = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            token = next(tokens) if chunk.samples else None
            if sequence.id in spoilt:
                self.blocks.withdraw(sequence.blocks)
            if sequence.phase is Phase.ENDED:
                self._free(sequence)
                finish = Finish.NONE
            elif sequence.id in spoilt:
                self.cancel(sequence.id)
                finish = Finish.NONE
            else:
                finish = self._advance(chunk, token, sequence.id in stopped)
            if chunk.samples:
                finishes.append(finish)
        return finishes

    def abort(self, plan: StepPlan) -> None:
        """Ends every sequence of a plan whose step failed: their KV cannot be trusted."""
        if plan is not self._out:
            raise RuntimeError("abort: this plan is not the one that is out")
        self._out = None
        for chunk in plan.chunks:
            if chunk.sequence.phase is Phase.ENDED:
                self._free(chunk.sequence)
            else:
                self.cancel(chunk.sequence.id)

    def _advance(self, chunk: Chunk, token: int | None, stopped: bool) -> Finish:
        sequence = chunk.sequence
        sequence.computed = chunk.start + chunk.count
        self._publish(sequence)
        if token is None:
            return Finish.NONE
        sequence.tokens.append(token)
        if stopped or self.at_length(sequence):
            self.cancel(sequence.id)
            return Finish.STOP if stopped else Finish.LENGTH
        if sequence.hold:
            self._running.remove(sequence)
            sequence.phase = Phase.HELD
            return Finish.HELD
        return Finish.NONE

    def _publish(self, sequence: Sequence) -> None:
        size = self.blocks.block_tokens
        full = sequence.computed // size
        if full > sequence.published:
            digests = sequence.prefix_digests(full, size)
            for index in range(sequence.published, full):
                self.blocks.publish(sequence.blocks[index], digests[index])
            sequence.published = full

    def _free(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

    def _is_out(self, sequence: Sequence) -> bool:
        return self._out is not None and any(c.sequence is sequence for c in self._out.chunks)

    def audit(self) -> None:
        """Raises AssertionError unless every block is accounted for. Cheap enough for every
        time the replica goes idle."""
        owners: list[Listing[int]] = [s.blocks for s in self._sequences.values()]
        owners += [reservation.blocks for reservation in self._reservations]
        if self._out is not None:
            ended = (c.sequence for c in self._out.chunks if c.sequence.phase is Phase.ENDED)
            owners += [sequence.blocks for sequence in ended]
        self.blocks.audit(owners)
