"""Two replicas, without threads or processes, and requests that take every path between them.

What is real: scheduler, step, forward pass, paged KV, sampling, text, hidden-state slots.
What an RPC or the driver would do is done here by hand, one step after another, so that a
scenario is the same each time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Literal

import torch

from blitzd.engine.arena import Arena
from blitzd.engine.attention import TorchAttention
from blitzd.engine.executor import Executor, Outcome
from blitzd.engine.generation import Generation
from blitzd.engine.hidden_slots import HiddenSlots, SlotGeometry
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.llama import Llama
from blitzd.engine.stepper import Stepper
from blitzd.engine.token_logprobs import TokenLogprobs, entries
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import BlockManager, NoRoom, Scheduler, StepPlan

STALE = 777.0
"""What unwritten KV and free slots hold: whoever reads it shows it."""
STEPS = 4_000
PATIENCE = 25
"""Tries of an import before its request goes on where it is."""


@dataclass(frozen=True)
class Spec:
    """A request, and what happens to it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: pb.Sampling
    arrives: int = 0
    """The turn of the loop."""
    hold: bool = False
    when_held: Literal["move", "go on", "lose"] = "move"
    holds: frozenset[int] = frozenset()
    """Numbers of output tokens at which it is told to stop after the next one, for a move; an
    even number's comes while a step is computed."""
    losses: frozenset[int] = frozenset()
    """Numbers of output tokens at which its replica forgets it: it goes on elsewhere, from
    its tokens alone."""


@dataclass(frozen=True)
class Shape:
    """Of one replica."""

    blocks: int
    block_tokens: int
    max_batch_tokens: int
    max_batch_size: int


class CutExecutor(Executor):
    """Runs each step in ranges of layers, with hidden states in slots between them."""

    def __init__(self, model: Llama, attention: TorchAttention, slots: HiddenSlots, seed: int):
        super().__init__(model, attention)
        self.slots = slots
        self._random = Random(seed)

    def run(
        self,
        plan: StepPlan,
        sampling: Sequence[Generation],
        scoring: Sequence[Generation] = (),
    ) -> Outcome:
        layers = self._model.config.layers
        inner = range(1, layers)
        cuts = sorted(self._random.sample(inner, self._random.randrange(layers)))
        hidden = self._through_slots(plan, [0, *cuts, layers])
        return self.conclude(plan, hidden, sampling, scoring)

    def _through_slots(self, plan: StepPlan, bounds: list[int]) -> torch.Tensor:
        """A failure in any range leaves no slot taken."""
        slot = None
        try:
            for first, last in pairwise(bounds):
                taken = None if slot is None else self.slots.get(slot)
                made = self.run_range(plan, first, last, taken)
                if slot is not None:
                    self.slots.release(slot)
                    slot = None
                slot = self.slots.put(made)
            assert slot is not None
            return self.slots.get(slot).clone()
        finally:
            if slot is not None:
                self.slots.get(slot).fill_(STALE)
                self.slots.release(slot)


class Side:
    """A replica."""

    def __init__(self, arena: Arena, tokenizer: Tokenizer, shape: Shape, seed: int) -> None:
        config = arena.config
        self.geometry = KvGeometry.of(config, shape.blocks, shape.block_tokens)
        self.kv = bytearray(self.geometry.bytes)
        self.cache = KvCache(self.geometry, self.kv)
        self.cache.tensor.fill_(STALE)
        attention = TorchAttention(self.cache, config.heads, config.sliding_window)
        places = SlotGeometry(1, shape.max_batch_tokens, config.hidden, config.dtype)
        self.slots = HiddenSlots(places, bytearray(places.bytes))
        executor = CutExecutor(Llama(config, arena, attention), attention, self.slots, seed)
        self.scheduler = Scheduler(
            BlockManager(shape.blocks, shape.block_tokens),
            context_tokens=config.context_tokens,
            max_batch_tokens=shape.max_batch_tokens,
            max_batch_size=shape.max_batch_size,
        )
        self.stepper = Stepper(executor, self.scheduler, tokenizer, config.vocab)
        self.preempted = 0

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> pb.StepReport | None:
        """`meanwhile` is what comes while it is computed."""
        step = self.stepper.begin()
        if step is None:
            return None
        self.preempted += len(step.plan.preempted)
        result = self.stepper.compute(step)
        meanwhile()
        return self.stepper.finish(step, result)

    def copy_from(self, source: Side, there: list[int], here: list[int], tokens: int) -> None:
        data = b"".join(source.kv[o : o + n] for o, n in source.geometry.segments(there))
        at = 0
        for offset, length in self.geometry.segments(here):
            self.kv[offset : offset + length] = data[at : at + length]
            at += length
        assert at == len(data)
        self.cache.clear_after(here, tokens)

    def assert_empty(self) -> None:
        occupancy = self.stepper.occupancy
        assert (occupancy.running, occupancy.waiting, occupancy.blocks_used) == (0, 0, 0)
        assert (self.scheduler.held, self.scheduler.reserved) == (0, 0)
        assert self.slots.free == self.slots.geometry.slots
        self.stepper.audit()


@dataclass
class Story:
    """What the client of one request has seen, and where the request is."""

    spec: Spec
    side: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: pb.FinishReason = pb.FinishReason.NONE
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    tries: int = 0
    asked: set[int] = field(default_factory=set)
    """Those of the spec's `holds` that have been."""
    lost: set[int] = field(default_factory=set)
    arrived: bool = False

    @property
    def ended(self) -> bool:
        return self.finish in (pb.FinishReason.STOP, pb.FinishReason.LENGTH)


class Cluster:
    def __init__(
        self,
        arena: Arena,
        tokenizer: Tokenizer,
        specs: Sequence[Spec],
        shapes: tuple[Shape, Shape],
        crashes: Mapping[int, int],
        seed: int,
    ) -> None:
        """`crashes` are turns at which a replica is lost with all that it knows."""
        self._make = lambda side: Side(arena, tokenizer, shapes[side], seed + side)
        self.sides = [self._make(0), self._make(1)]
        self.stories = {i: Story(spec, i % 2) for i, spec in enumerate(specs, 1)}
        self._crashes = crashes
        self.did: Counter[str] = Counter()

    def run(self) -> None:
        for turn in range(STEPS):
            if turn in self._crashes:
                self._crash(self._crashes[turn])
            for number, story in self.stories.items():
                if story.spec.arrives == turn:
                    self._prefill(number, story)
            for side in (0, 1):
                report = self.sides[side].step(lambda: self._hold(even=True))
                if report is not None:
                    self._take(report)
            self._act()
            self._hold(even=False)
            if all(story.ended for story in self.stories.values()):
                break
        else:
            raise AssertionError("these never end: " + str(self._unfinished()))
        for one in self.sides:
            one.assert_empty()
            self.did["preempted"] += one.preempted

    def _unfinished(self) -> list[int]:
        return [number for number, story in self.stories.items() if not story.ended]

    def _request(self, number: int, story: Story) -> pb.Request:
        """As the driver sends it: with what was produced before."""
        sampling = story.spec.sampling
        if story.tokens:
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        return pb.Request(
            request_id=number,
            prompt_tokens=list(story.spec.prompt),
            output_tokens=list(story.tokens),
            max_tokens=story.spec.max_tokens,
            sampling=sampling,
        )

    def _prefill(self, number: int, story: Story) -> None:
        stepper = self.sides[story.side].stepper
        story.finish, story.arrived = pb.FinishReason.NONE, True
        stepper.prefill(self._request(number, story), story.spec.hold)

    def _elsewhere(self, number: int, story: Story) -> None:
        story.side = 1 - story.side
        self._prefill(number, story)

    def _crash(self, side: int) -> None:
        self.did["preempted"] += self.sides[side].preempted
        self.sides[side] = self._make(side)
        for number, story in self.stories.items():
            if story.side == side and story.arrived and not story.ended:
                self.did["crashed under"] += 1
                self._elsewhere(number, story)

    def _take(self, report: pb.StepReport) -> None:
        assert not report.errors, report.errors
        columns = (
            report.request_ids,
            report.token_ids,
            report.texts,
            report.finish,
            report.cached_tokens,
        )
        for number, token, text, finish, cached in zip(*columns, strict=True):
            story = self.stories[number]
            assert not story.ended
            story.tokens.append(token)
            story.text += text
            story.finish = finish
            self.did["cached"] += cached
        for number, position, found in entries(report):
            story = self.stories[number]
            # A prompt that is computed again is scored again.
            again = position in story.logprobs and position < len(story.spec.prompt)
            assert again or position not in story.logprobs
            story.logprobs[position] = found

    def _act(self) -> None:
        for number, story in self.stories.items():
            length = len(story.tokens)
            if not story.ended and length in story.spec.losses - story.lost:
                story.lost.add(length)
                self._lose(number, story)
            elif story.finish is pb.FinishReason.HELD:
                self._held(number, story)

    def _hold(self, even: bool) -> None:
        """Of those that run, as a drain or a rebalance stops them for a move."""
        for number, story in self.stories.items():
            length = len(story.tokens)
            if (
                story.arrived
                and story.finish is pb.FinishReason.NONE
                and length in story.spec.holds - story.asked
                and (length % 2 == 0) == even
            ):
                story.asked.add(length)
                story.tries = 0
                assert self.sides[story.side].stepper.hold([number]) == [number]

    def _lose(self, number: int, story: Story) -> None:
        self.did["lost"] += 1
        assert self.sides[story.side].stepper.cancel([number]) == 1
        self._elsewhere(number, story)

    def _held(self, number: int, story: Story) -> None:
        source = self.sides[story.side]
        if story.spec.when_held == "lose" and story.tries == 0:
            story.tries += 1
            self._lose(number, story)
        elif story.spec.when_held == "move" and story.tries < PATIENCE:
            story.tries += 1
            target = self.sides[1 - story.side]
            try:
                here = target.stepper.reserve(self._request(number, story))
            except NoRoom:
                return
            tokens, there = source.stepper.held(number)
            assert tokens == len(story.spec.prompt) + len(story.tokens) - 1
            target.copy_from(source, there, here, tokens)
            target.stepper.adopt(number, lease=1)
            assert source.stepper.release([number]) == 1
            story.side, story.finish = 1 - story.side, pb.FinishReason.NONE
            self.did["moved"] += 1
            self.did["moved in decode"] += len(story.tokens) - 1 in story.asked - {0}
        else:
            story.finish = pb.FinishReason.NONE
            source.stepper.resume([number])
            self.did["went on"] += 1
