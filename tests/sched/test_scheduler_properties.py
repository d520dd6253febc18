"""Random schedules of every operation, 10,000 a run, against a model that would notice."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st

from blitzd.sched import BlockManager, Finish, NoRoom, Refused, Reservation, Scheduler, Sequence
from tests.sched.virtual_model import VirtualModel, continuation

OPERATIONS = 10_000


@dataclass
class Run:
    rng: random.Random
    model: VirtualModel
    next_id: int = 0
    live: dict[int, Sequence] = field(default_factory=dict)
    held: dict[int, Sequence] = field(default_factory=dict)
    reservations: list[tuple[Reservation, Sequence]] = field(default_factory=list)
    prompts: dict[int, list[int]] = field(default_factory=dict)
    finished: int = 0
    preempted: int = 0
    cached: int = 0

    def new_sequence(self, hold: bool) -> Sequence:
        self.next_id += 1
        # Few distinct prefixes, so that blocks are shared all the time.
        prefix = [self.rng.randrange(3)] * self.rng.randrange(1, 20)
        prompt = prefix + [self.rng.randrange(4) for _ in range(self.rng.randrange(6))]
        self.prompts[self.next_id] = prompt
        return Sequence(self.next_id, list(prompt), len(prompt), self.rng.randrange(1, 16), hold)

    def add(self) -> None:
        if len(self.live) > 64:
            return
        sequence = self.new_sequence(hold=self.rng.random() < 0.25)
        try:
            self.model.scheduler.add(sequence)
        except Refused:
            return
        self.live[sequence.id] = sequence

    def cancel(self) -> None:
        known = [*self.live, *self.held]
        if known:
            chosen = self.rng.choice(known)
            assert self.model.scheduler.cancel(chosen)
            self.live.pop(chosen, None)
            self.held.pop(chosen, None)

    def release(self) -> None:
        if self.held:
            chosen = self.rng.choice(list(self.held))
            assert self.model.scheduler.release(chosen)
            del self.held[chosen]

    def resume(self) -> None:
        if self.held:
            chosen = self.rng.choice(list(self.held))
            try:
                assert self.model.scheduler.resume(chosen)
            except Refused:
                return
            self.live[chosen] = self.held.pop(chosen)

    def reserve(self) -> None:
        sequence = self.new_sequence(hold=False)
        produced = self.rng.randrange(1, sequence.max_tokens + 1)
        sequence.tokens += continuation(sequence.tokens, produced)
        try:
            reservation = self.model.scheduler.reserve(len(sequence.tokens))
        except NoRoom:
            return
        self.reservations.append((reservation, sequence))

    def settle(self) -> None:
        """Adopts or gives back one reservation."""
        if not self.reservations:
            return
        reservation, sequence = self.reservations.pop(self.rng.randrange(len(self.reservations)))
        try:
            if self.rng.random() < 0.3:
                raise Refused("changed our mind")
            self.model.adopt(reservation, sequence)
            self.live[sequence.id] = sequence
        except Refused:
            self.model.scheduler.give_back(reservation)

    def step(self) -> None:
        if self.rng.random() < 0.02:
            self.fail_a_step()
            return
        stop_here = self.rng.random() < 0.05
        for sequence, token, finish in self.model.step(lambda s, t: stop_here and t % 2 == 0):
            assert sequence.tokens[-1] == token
            self.check_tokens(sequence)
            if finish is not Finish.NONE:
                del self.live[sequence.id]
                self.preempted += sequence.preemptions
                self.cached += sequence.cached_tokens
            if finish is Finish.HELD:
                self.held[sequence.id] = sequence
            elif finish is Finish.LENGTH:
                self.finished += 1
                context = self.model.scheduler.context_tokens
                full = min(sequence.prompt_tokens + sequence.max_tokens, context)
                assert len(sequence.tokens) == full

    def fail_a_step(self) -> None:
        plan = self.model.scheduler.schedule()
        if plan.chunks:
            self.model.scheduler.abort(plan)
        for chunk in plan.chunks:
            del self.live[chunk.sequence.id]

    def check_tokens(self, sequence: Sequence) -> None:
        prompt = self.prompts[sequence.id]
        assert sequence.tokens == prompt + continuation(prompt, sequence.output_tokens)

    def drain(self) -> None:
        """Lets go of what others own; everything else must then finish by itself."""
        while self.held:
            self.release()
        while self.reservations:
            self.settle()
        for _ in range(5_000):
            if not self.live:
                return
            self.step()
            while self.held:
                self.release()
        raise AssertionError(f"these never finish: {list(self.live)}")


def run(seed: int, blocks: int, budget: int, batch: int) -> Run:
    rng = random.Random(seed)
    scheduler = Scheduler(
        BlockManager(blocks, 4),
        context_tokens=30,
        max_batch_tokens=budget,
        max_batch_size=min(batch, budget),
    )
    state = Run(rng, VirtualModel(scheduler))
    operations = (
        state.step,
        state.add,
        state.cancel,
        state.release,
        state.resume,
        state.reserve,
        state.settle,
    )
    for number in range(OPERATIONS):
        rng.choices(operations, (12, 4, 1, 1, 1, 2, 3))[0]()
        if number % 16 == 0:
            scheduler.audit()
    state.drain()
    assert (scheduler.running, scheduler.waiting, scheduler.held, scheduler.reserved) == (0,) * 4
    assert scheduler.blocks.used == 0
    scheduler.audit()
    return state


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(4, 40),
    budget=st.integers(1, 24),
    batch=st.integers(1, 8),
)
def test_no_schedule_leaks_a_block_or_changes_a_token(
    seed: int, blocks: int, budget: int, batch: int
) -> None:
    run(seed, blocks, budget, batch)


def test_the_random_schedules_reach_what_they_are_meant_to_test() -> None:
    state = run(seed=1, blocks=12, budget=16, batch=6)
    assert state.finished > 100
    assert state.preempted > 100
    assert state.cached > 1000


def test_the_same_operations_give_the_same_schedule() -> None:
    def trace(seed: int) -> tuple[int, int, int, int]:
        state = run(seed, blocks=12, budget=16, batch=6)
        return state.next_id, state.finished, state.preempted, state.cached

    assert trace(7) == trace(7)
