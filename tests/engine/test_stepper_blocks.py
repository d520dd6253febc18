"""No prompt, parameter mix or order of cancellations leaks a block: random schedules of
everything that a worker's RPCs do to a stepper, also while a step is being computed."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blitzd.engine.errors import InvalidField, NotHeld
from blitzd.engine.executor import Executor
from blitzd.engine.stepper import Step, Stepper
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import BlockManager, NoRoom, Refused, Scheduler
from tests.tiny import END, make_tiny, tiny_config

OPERATIONS = 10_000
VOCAB = tiny_config().vocab


class Dice:
    """A model whose logits are drawn, and that fails now and then. Sampling, stop strings and
    everything above it are real."""

    config = SimpleNamespace(layers=1, hidden=1)

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.failures = 0

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(len(tokens), 1)

    def run_layers(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        if float(torch.rand(1, generator=self._generator)) < 0.02:
            self.failures += 1
            raise RuntimeError("the dice fell off the table")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = 2 * torch.randn(len(hidden), VOCAB, generator=self._generator)
        logits[:, END] += 4  # an end about every ten tokens
        return logits

    def plan(self, batch: Any) -> None:
        """As the attention."""


class Schedule:
    def __init__(self, directory: Path, seed: int, blocks: int) -> None:
        self.random = random.Random(seed)
        self.dice = Dice(seed)
        self.stepper = Stepper(
            Executor(self.dice, self.dice),  # type: ignore[arg-type]
            Scheduler(
                BlockManager(blocks, 4), context_tokens=40, max_batch_tokens=24, max_batch_size=6
            ),
            Tokenizer.from_dir(directory),
            VOCAB,
        )
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
            sampling=pb.Sampling(
                temperature=self.random.choice([0.0, 0.7, 1.5, -1.0 if roll() < 0.1 else 1.0]),
                seed=self.random.randrange(1 << 32),
                stop=self.random.choice([[], ["a"], ["xy", "\n", "é"]]),
                min_tokens=self.random.choice([0, 0, 3]),
                ignore_eos=roll() < 0.3,
            ),
        )

    # -- what an RPC, or the step loop, does ----------------------------------------------

    def add(self) -> None:
        request = self.request()
        try:
            self.stepper.prefill(request, hold=self.random.random() < 0.4)
        except (InvalidField, Refused, NoRoom) as error:
            self.did(type(error).__name__)
        else:
            self.known.append(request.request_id)
            self.did("added")

    def begin(self) -> None:
        if self.out is None:
            self.out = self.stepper.begin()

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

    def run(self) -> None:
        operations = {
            self.begin: 12, self.finish: 12, self.add: 6, self.cancel: 2, self.release: 2,
            self.resume: 1, self.export: 1, self.reserve: 2, self.settle: 2, self.reset: 1,
        }  # fmt: skip
        for number in range(OPERATIONS):
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


@pytest.mark.parametrize(("seed", "blocks"), [(1, 12), (2, 40)])
def test_blocks_in_use_are_zero_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, blocks: int
) -> None:
    quiet = SimpleNamespace(exception=lambda *args, **fields: None)
    monkeypatch.setattr("blitzd.engine.stepper.log", quiet)
    schedule = Schedule(make_tiny(tmp_path / "tiny"), seed, blocks)
    schedule.run()
    schedule.drain()
    occupancy = schedule.stepper.occupancy
    assert (occupancy.running, occupancy.waiting, occupancy.blocks_used) == (0, 0, 0)
    schedule.stepper.audit()
    seen = schedule.seen
    assert schedule.dice.failures > 5 and seen["failed"] > 5
    for what in (
        "added", "STOP", "LENGTH", "HELD", "adopted", "released", "exported", "cancelled",
        "cancelled in a step", "InvalidField", "Refused", "import Refused", "reset",
    ):  # fmt: skip
        assert seen.get(what, 0) > 0, f"the schedule never came to {what}: {seen}"
