"""A step cut between layers: whoever goes on, the tokens are those of the whole step."""

from __future__ import annotations

import os
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from blitzd.engine.arena import Arena
from blitzd.engine.attention import TorchAttention
from blitzd.engine.executor import Executor
from blitzd.engine.generation import Generation, admit
from blitzd.engine.hidden_slots import HiddenSlots, SlotGeometry
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.llama import Llama
from blitzd.engine.tokenizer import Tokenizer
from blitzd.fabric import SharedArena
from blitzd.sched import Chunk, NoRoom, StepPlan
from tests.engine.local_replica import request
from tests.tiny import make_tiny

torch.set_num_threads(1)

LAYERS, HIDDEN, BLOCK, BLOCKS = 4, 48, 16, 32
PROMPTS = ["The capital of France", "a", "x" * 40, "naïve café"]
TOKENS, CHUNK = 10, 13
CUTS = [cuts for count in (1, 2, 3) for cuts in combinations(range(1, LAYERS), count)]


@pytest.fixture(
    scope="module", params=[{}, {"sliding_window": 9, "qkv_bias": True}], ids=["llama", "window"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("ranges") / "tiny"
    return make_tiny(target, "float64", layers=LAYERS, **request.param)


class Side:
    """One replica's half: executor, KV cache, and block tables of its own."""

    def __init__(self, directory: Path, first_block: int = 0) -> None:
        arena = Arena.open(directory)
        geometry = KvGeometry.of(arena.config, BLOCKS, BLOCK)
        self.cache = KvCache(geometry, bytearray(geometry.bytes))
        attention = TorchAttention(self.cache, arena.config.heads, arena.config.sliding_window)
        self.executor = Executor(Llama(arena.config, arena, attention), attention)
        self.tokenizer = Tokenizer.from_dir(directory)
        self.vocab = arena.config.vocab
        self.next_block = first_block
        self.generations = [self._generation(i, text) for i, text in enumerate(PROMPTS)]

    def _generation(self, number: int, prompt: str) -> Generation:
        one = request(number + 1, prompt, TOKENS)
        return admit(one, self.tokenizer, self.vocab, hold=False)

    def plan(self) -> StepPlan | None:
        """All requests together, prompts in chunks; None when all have their tokens."""
        chunks = []
        for generation in self.generations:
            sequence = generation.sequence
            if sequence.output_tokens == TOKENS:
                continue
            count = min(sequence.wanted, CHUNK)
            while len(sequence.blocks) * BLOCK < sequence.computed + count:
                # Its own number for the block: tables of two sides must not be alike.
                sequence.blocks.append(self.next_block % BLOCKS)
                self.next_block += 1
            samples = count == sequence.wanted
            chunks.append(Chunk(sequence, sequence.computed, count, samples))
        return StepPlan(tuple(chunks)) if chunks else None

    def sampling(self, plan: StepPlan) -> list[Generation]:
        return [self.generations[chunk.sequence.id - 1] for chunk in plan.sampling]

    def complete(self, plan: StepPlan, sampled: list[int]) -> None:
        tokens = iter(sampled)
        for chunk in plan.chunks:
            chunk.sequence.computed += chunk.count
            if chunk.samples:
                chunk.sequence.tokens.append(next(tokens))

    @property
    def outputs(self) -> list[list[int]]:
        return [g.sequence.tokens[g.sequence.prompt_tokens :] for g in self.generations]


def whole(directory: Path) -> list[list[int]]:
    side = Side(directory)
    while (plan := side.plan()) is not None:
        side.complete(plan, side.executor.run(plan, side.sampling(plan)).tokens)
    return side.outputs


def slots_for(side: Side, count: int = 2) -> HiddenSlots:
    geometry = SlotGeometry(count, CHUNK * len(PROMPTS), HIDDEN, "float64")
    return HiddenSlots(geometry, bytearray(geometry.bytes))


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_any_ranges_give_the_hidden_states_of_the_whole(model: Path, cuts: tuple[int, ...]) -> None:
    one, cut = Side(model), Side(model)
    slots = slots_for(cut, 1)
    while (plan := one.plan()) is not None:
        same = cut.plan()
        assert same is not None
        expected = one.executor.run_range(plan, 0, LAYERS)
        hidden: torch.Tensor | None = None
        for first, last in pairwise([0, *cuts, LAYERS]):
            made = cut.executor.run_range(same, first, last, hidden)
            slot = slots.put(made)
            hidden = slots.get(slot).clone()
            slots.release(slot)
        assert hidden is not None
        assert torch.equal(hidden, expected)
        for side, own in ((one, plan), (cut, same)):
            side.complete(own, side.executor.conclude(own, expected, side.sampling(own)).tokens)
    assert slots.free == 1
    assert torch.equal(one.cache.tensor, cut.cache.tensor)


@pytest.mark.parametrize("cut", range(1, LAYERS))
def test_two_executors_with_half_the_layers_each_make_the_tokens_of_one(
    model: Path, cut: int
) -> None:
    """Prompts in chunks, decodes beside them; each half's KV lies with who computed it."""
    new, old = Side(model), Side(model, first_block=7)
    slots = slots_for(new)
    while (plan := new.plan()) is not None:
        theirs = old.plan()
        assert theirs is not None
        slot = slots.put(new.executor.run_range(plan, 0, cut))
        hidden = old.executor.run_range(theirs, cut, LAYERS, slots.get(slot))
        slots.release(slot)
        sampled = old.executor.conclude(theirs, hidden, old.sampling(theirs)).tokens
        new.complete(plan, sampled)
        old.complete(theirs, sampled)
    assert new.outputs == whole(model)
    assert slots.free == slots.geometry.slots
    assert new.cache.tensor[:cut].any() and not new.cache.tensor[cut:].any()
    assert old.cache.tensor[cut:].any() and not old.cache.tensor[:cut].any()


def test_a_batch_waits_in_its_slot_while_others_run(model: Path) -> None:
    """The executor plans anew for who comes in between, and again for who is taken up."""
    side = Side(model)
    slots = slots_for(side)
    waiting, others = side.generations[2:], side.generations[:2]
    side.generations = waiting
    plan = side.plan()
    assert plan is not None
    slot = slots.put(side.executor.run_range(plan, 0, 2))
    side.generations = others
    between = side.plan()
    assert between is not None
    side.executor.run(between, [others[c.sequence.id - 1] for c in between.sampling])
    hidden = side.executor.run_range(plan, 2, LAYERS, slots.get(slot))
    alone = Side(model)
    alone.generations = alone.generations[2:]
    reference = alone.plan()
    assert reference is not None
    torch.testing.assert_close(
        hidden, alone.executor.run_range(reference, 0, LAYERS), rtol=0, atol=1e-12
    )


def test_another_process_takes_the_hidden_states_up(model: Path) -> None:
    """Both ends are slots over one shared mapping; the other process has weights and KV of
    its own."""
    new = Side(model)
    geometry = SlotGeometry(2, CHUNK * len(PROMPTS), HIDDEN, "float64")
    shared = SharedArena(geometry.bytes, name="test-hidden")
    slots = HiddenSlots(geometry, shared.buffer)
    plan = new.plan()
    assert plan is not None
    slot = slots.put(new.executor.run_range(plan, 0, 3))
    answer = slots.reserve(plan.tokens)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            old = Side(model, first_block=5)
            theirs = old.plan()
            assert theirs is not None
            slots.get(answer).copy_(old.executor.run_range(theirs, 3, LAYERS, slots.get(slot)))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hidden = slots.get(answer).clone()
    slots.release(slot)
    slots.release(answer)
    one = Side(model)
    reference = one.plan()
    assert reference is not None
    assert torch.equal(hidden, one.executor.run_range(reference, 0, LAYERS))
    assert slots.free == 2
    del slots
    shared.close()


def test_ranges_that_do_not_fit_are_refused(model: Path) -> None:
    side = Side(model)
    plan = side.plan()
    assert plan is not None
    rows = torch.zeros(plan.tokens, HIDDEN, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"layers \[1, 4\): hidden states are needed"):
        side.executor.run_range(plan, 1, LAYERS)
    with pytest.raises(ValueError, match=r"layers \[0, 4\): hidden states are needed, unless"):
        side.executor.run_range(plan, 0, LAYERS, rows)
    with pytest.raises(ValueError, match=rf"shape \[3, {HIDDEN}\]; this plan has \[{plan.tokens}"):
        side.executor.run_range(plan, 1, LAYERS, rows[:3])
    with pytest.raises(ValueError, match=r"layers \[2, 9\) of \[0, 4\)"):
        side.executor.run_range(plan, 2, 9, rows)


def test_slots_are_bounded_and_refuse_what_does_not_fit() -> None:
    geometry = SlotGeometry(2, 8, 4, "float32")
    slots = HiddenSlots(geometry, bytearray(geometry.bytes))
    rows = torch.arange(12, dtype=torch.float32).view(3, 4)
    first, second = slots.put(rows), slots.put(rows + 1)
    with pytest.raises(NoRoom, match="all 2 slots"):
        slots.put(rows)
    assert torch.equal(slots.get(first), rows)
    assert torch.equal(slots.get(second), rows + 1)
    slots.release(first)
    assert slots.free == 1
    with pytest.raises(KeyError):
        slots.release(first)
    with pytest.raises(KeyError):
        slots.get(first)
    for wrong, message in [
        (torch.zeros(9, 4), "rows: 9; a slot takes 1 to 8"),
        (torch.zeros(3, 5), r"shape \[3, 5\]; \[rows, 4\] fits"),
        (torch.zeros(3, 4, dtype=torch.float64), "the slots hold torch.float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            slots.put(wrong)
    assert slots.free == 1, "a refused batch takes no slot"
    with pytest.raises(ValueError, match="needed"):
        HiddenSlots(geometry, bytearray(geometry.bytes - 1))
    with pytest.raises(ValueError, match="read-only"):
        HiddenSlots(geometry, bytes(geometry.bytes))


def test_segments_are_where_the_rows_are() -> None:
    geometry = SlotGeometry(3, 8, 4, "float32")
    there, here = bytearray(geometry.bytes), bytearray(geometry.bytes)
    source, target = HiddenSlots(geometry, there), HiddenSlots(geometry, here)
    target.reserve(1)
    rows = torch.randn(5, 4)
    slot, arriving = source.put(rows), target.reserve(5)
    (at, length), (to, same) = source.segment(slot), target.segment(arriving)
    assert length == same == 5 * 4 * 4
    here[to : to + length] = there[at : at + length]
    assert torch.equal(target.get(arriving), rows)
