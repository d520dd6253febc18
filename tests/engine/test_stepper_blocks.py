"""No prompt, parameter mix or order of cancellations leaks a block or a slot for hidden
states: random schedules of everything that a worker's RPCs do to a stepper, also while a step
is being computed. Long ones over a model of dice, shorter ones over a real forward pass."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blitzd.engine.arena import Arena
from blitzd.engine.attention import TorchAttention
from blitzd.engine.batch import BatchLayout
from blitzd.engine.errors import InvalidField, NotHeld
from blitzd.engine.hidden_slots import HiddenSlots, SlotGeometry
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.llama import Llama
from blitzd.engine.stepper import Step, Stepper
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import BlockManager, NoRoom, Refused, Scheduler
from tests.engine.scenario import STALE, CutExecutor
from tests.tiny import END, make_tiny, tiny_config

OPERATIONS = 10_000
REAL_OPERATIONS = 1_500
BATCH_TOKENS, BLOCK = 24, 4
VOCAB = tiny_config().vocab
HIDDEN = tiny_config().hidden


class Dice:
    """A model whose logits are drawn. Sampling, stop strings and everything above are real."""

    config = SimpleNamespace(layers=4, hidden=HIDDEN)

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(len(tokens), HIDDEN)

    def run_layers(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = 2 * torch.randn(len(hidden), VOCAB, generator=self._generator)
        logits[:, END] += 4  # an end about every ten tokens
        return logits

    def plan(self, batch: BatchLayout) -> None:
        """As the attention."""


def real(directory: Path, blocks: int) -> tuple[Llama, TorchAttention]:
    arena = Arena.open(directory)
    geometry = KvGeometry.of(arena.config, blocks, BLOCK)
    cache = KvCache(geometry, bytearray(geometry.bytes))
    cache.tensor.fill_(STALE)
    attention = TorchAttention(cache, arena.config.heads)
    return Llama(arena.config, arena, attention), attention


class FailingExecutor(CutExecutor):
    """Fails now and then, between any two layers."""

    failures = 0

    def run_range(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._random.random() < 0.01:
            self.failures += 1
            raise RuntimeError("the dice fell off the table")
        return super().run_range(*args, **kwargs)


class Schedule:
    def __init__(self, directory: Path, seed: int, blocks: int, model: Any = None) -> None:
        self.random = random.Random(seed)
        dice = Dice(seed)
        geometry = SlotGeometry(1, BATCH_TOKENS, HIDDEN, "float32")
        self.slots = HiddenSlots(geometry, bytearray(geometry.bytes))
        self.executor = FailingExecutor(*(model or (dice, dice)), self.slots, seed)
        self.scheduler = Scheduler(
            BlockManager(blocks, BLOCK),
            context_tokens=40,
            max_batch_tokens=BATCH_TOKENS,
            max_batch_size=6,
        )
        self.stepper = Stepper(self.executor, self.scheduler, Tokenizer.from_dir(directory), VOCAB)
        self.out: Step | None = None
        self.known: list[int] = []
        self.imports: list[int] = []
        self.held: list[int] = []
        self.seen: dict[str, int] = {}
        self.next_id = 1

    def did(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    def request(self, output: int = 0) -> pb.Request:
        """Any prompt and parameters, some of them out of range."""
        roll = self.random.random
        token = lambda: self.random.randrange(256 if roll() < 0.99 else 1000)  # noqa: E731
        # Few different starts, so that prefixes are shared.
        prompt = [self.random.choice([7, 8])] * self.random.randrange(14)
        prompt += [token() for _ in range(self.random.randrange(12))]
        number = self.next_id if roll() < 0.97 else max(1, self.next_id - 3)
        self.next_id += 1
        return pb.Request(
            request_id=number,
            prompt_tokens=prompt,
            output_tokens=[self.random.randrange(256) for _ in range(output)],
            max_tokens=self.random.choice([0, 1, 2, 5, 12, 60]),
            sampling=self.sampling(),
        )

    def sampling(self) -> pb.Sampling:
        """Any mix; now and then out of range."""
        one_of, roll = self.random.choice, self.random.random
        return pb.Sampling(
            temperature=one_of([0.0, 0.7, 1.5, -1.0 if roll() < 0.1 else 1.0]),
            seed=self.random.randrange(1 << 64),
            stop=one_of([[], ["a"], ["xy", "\n", "é"]]),
            stop_token_ids=one_of([[], [], [8, 9]]),
            min_tokens=one_of([0, 0, 3]),
            ignore_eos=roll() < 0.3,
            top_k=one_of([0, 0, 1, 20]),
            top_p=one_of([None, 0.9, 0.0, 1.2 if roll() < 0.1 else 1.0]),
            min_p=one_of([0.0, 0.1]),
            typical_p=one_of([None, 0.5]),
            presence_penalty=one_of([0.0, 1.0]),
            frequency_penalty=one_of([0.0, -1.0]),
            repetition_penalty=one_of([None, 1.3]),
            bias_token_ids=[7, END],
            bias_values=one_of([[0.0, 0.0], [5.0, -100.0], [1.0]]) if roll() < 0.2 else [0.0, 0.0],
            logprobs=one_of([None, None, 0, 3]),
            prompt_logprobs=one_of([None, None, None, 1]),
        )

    # -- what an RPC, or the step loop, does ----------------------------------------------

    def add(self) -> None:
        """One request, or the `n` choices of one: prompt and parameters again, another seed."""
        request = self.request()
        hold = self.random.random() < 0.4
        for choice in range(self.random.choice([1, 1, 1, 3])):
            if choice:
                request = dataclasses.replace(
                    request,
                    request_id=self.next_id,
                    sampling=dataclasses.replace(request.sampling, seed=choice),
                )
                self.next_id += 1
                self.did("choice")
            try:
                self.stepper.prefill(request, hold)
            except (InvalidField, Refused, NoRoom) as error:
                self.did(type(error).__name__)
            else:
                self.known.append(request.request_id)
                self.did("added")

    def begin(self) -> None:
        if self.out is None:
            self.out = self.stepper.begin()
            if self.out is not None and self.out.plan.preempted:
                self.did("preempted")

    def finish(self) -> None:
        if self.out is None:
            return
        report = self.stepper.finish(self.out, self.stepper.compute(self.out))
        self.out = None
        for number, finish in zip(report.request_ids, report.finish, strict=True):
            self.did(finish.name or "?")
            if finish is pb.FinishReason.HELD:
                self.held.append(number)
        for _ in report.failed_ids:
            self.did("failed")
        if any(report.cached_tokens):
            self.did("cached")
        if report.logprob_values:
            self.did("logprobs")

    def some(self, numbers: list[int]) -> list[int]:
        chosen = self.random.sample(numbers, min(len(numbers), self.random.randrange(3)))
        return [*chosen, self.random.randrange(1, self.next_id + 1)]

    def cancel(self) -> None:
        if self.stepper.cancel(self.some(self.known[-12:])):
            self.did("cancelled in a step" if self.out is not None else "cancelled")

    def release(self) -> None:
        if self.stepper.release(self.some(self.held[-6:])):
            self.did("released")

    def resume(self) -> None:
        for number in self.some(self.held[-6:]):
            try:
                self.stepper.resume([number])
            except Refused:
                self.did("resume refused")
            else:
                self.did("resumed")

    def export(self) -> None:
        for number in self.some(self.held[-6:]):
            try:
                tokens, blocks = self.stepper.held(number)
            except NotHeld:
                continue
            assert 0 < tokens <= 4 * len(blocks)
            self.did("exported")

    def reserve(self) -> None:
        request = self.request(output=self.random.choice([0, 1, 1, 4]))
        try:
            self.stepper.reserve(request)
        except (InvalidField, Refused, NoRoom) as error:
            self.did("import " + type(error).__name__)
        else:
            self.imports.append(request.request_id)

    def settle(self) -> None:
        """An import's end, whichever; as the importer does, it gives back at last."""
        if not self.imports:
            return
        number = self.imports.pop(self.random.randrange(len(self.imports)))
        if self.random.random() < 0.6:
            try:
                self.stepper.adopt(number, lease=1)
            except Refused:
                self.did("adoption refused")
            else:
                self.known.append(number)
                self.did("adopted")
        self.stepper.give_back(number)

    def reset(self) -> None:
        if self.random.random() < 0.02:
            self.stepper.reset()
            self.did("reset")

    def run(self, count: int) -> None:
        operations = {
            self.begin: 12, self.finish: 12, self.add: 6, self.cancel: 2, self.release: 2,
            self.resume: 1, self.export: 1, self.reserve: 2, self.settle: 2, self.reset: 1,
        }  # fmt: skip
        for number in range(count):
            self.random.choices(list(operations), list(operations.values()))[0]()
            if number % 16 == 0:
                self.stepper.audit()

    def drain(self) -> None:
        """Everyone who waits for something gets it; nobody is cancelled for tidiness."""
        self.finish()
        while self.imports:
            self.settle()
        for _ in range(10_000):
            self.stepper.release(self.held)
            self.begin()
            if self.out is None:
                break
            self.finish()
        assert self.stepper.begin() is None


EVERYTHING = (
    "added", "choice", "STOP", "LENGTH", "HELD", "adopted", "released", "resumed", "exported",
    "cancelled", "cancelled in a step", "InvalidField", "Refused", "import Refused", "reset",
    "failed", "preempted", "cached", "logprobs",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = SimpleNamespace(exception=lambda *args, **fields: None)
    monkeypatch.setattr("blitzd.engine.stepper.log", silent)


def assert_nothing_is_left(schedule: Schedule, operations: int) -> None:
    schedule.run(operations)
    schedule.drain()
    occupancy = schedule.stepper.occupancy
    assert (occupancy.running, occupancy.waiting, occupancy.blocks_used) == (0, 0, 0)
    assert (schedule.scheduler.held, schedule.scheduler.reserved) == (0, 0)
    assert schedule.slots.free == schedule.slots.geometry.slots
    schedule.stepper.audit()
    missing = [what for what in EVERYTHING if not schedule.seen.get(what)]
    assert not missing, f"the schedule never came to {missing}: {schedule.seen}"
    assert schedule.executor.failures > 5


@pytest.mark.parametrize(("seed", "blocks"), [(1, 12), (3, 40)])
def test_blocks_in_use_are_zero_when_idle(tmp_path: Path, seed: int, blocks: int) -> None:
    schedule = Schedule(make_tiny(tmp_path / "tiny"), seed, blocks)
    assert_nothing_is_left(schedule, OPERATIONS)


def test_a_real_forward_pass_leaves_nothing_either(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "tiny")
    schedule = Schedule(directory, 5, 14, real(directory, 14))
    assert_nothing_is_left(schedule, REAL_OPERATIONS)
