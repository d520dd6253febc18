"""Step times of the engine as it serves: scheduler, forward pass, sampling, text.

A decode step is timed over requests that are adopted, as after a hand-over, so that no prompt
is computed for a context. The cache is filled first: pages that nobody has written are one
page of zeros, which any processor reads faster than memory.
"""

from __future__ import annotations

import mmap
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import blitzd
from blitzd.engine.arena import Arena
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import BLOCK_TOKENS, KvGeometry
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.replica import build_executor, model_device
from blitzd.engine.stepper import Stepper
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import BlockManager, Scheduler

PROFILE = "blitzd-step-times/1"
"""The form that `blitzd sim --coefficients` reads."""

LEAST_POINTS = 3
"""Of either phase: the three coefficients of a phase are fitted to them."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    batches: Sequence[int]
    contexts: Sequence[int]
    """Tokens that a request has when it is decoded; every batch is measured at each."""
    prompts: Sequence[int]
    """Tokens of a prompt, computed alone and in one step."""
    rounds: int
    steps: int
    """Decode steps a round, after one that is not counted."""

    def check(self, context_tokens: int) -> None:
        """Raises ValueError naming the field, the value and what would do."""
        for field in ("batches", "contexts", "prompts"):
            values = getattr(self, field)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ValueError(f"{field}: {list(values)}; different numbers from 1 are needed")
        for field in ("rounds", "steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)}; must be at least 1")
        if min(self.contexts) < 2:
            raise ValueError("contexts: 1; at least a prompt's token and an output's are needed")
        for field, longest in (
            ("contexts", max(self.contexts) + self.steps + 1),
            ("prompts", max(self.prompts) + 1),
        ):
            if longest > context_tokens:
                raise ValueError(
                    f"{field}: {max(getattr(self, field))} grows to {longest} tokens here; the "
                    f"model's context has {context_tokens}"
                )
        decodes = len(self.batches) * len(self.contexts)
        for field, count in (("prompts", len(self.prompts)), ("batches x contexts", decodes)):
            if count < LEAST_POINTS:
                raise ValueError(f"{field}: {count} points; a fit needs at least {LEAST_POINTS}")

    @property
    def blocks(self) -> int:
        """Of KV, for the largest point."""
        each = -(-(max(self.contexts) + self.steps + 1) // BLOCK_TOKENS)
        return max(max(self.batches) * each, -(-(max(self.prompts) + 1) // BLOCK_TOKENS))


@dataclass(frozen=True, slots=True)
class Point:
    batch: int
    """Requests decoded together; 0 for a prompt."""
    tokens: int
    """Of the prompt, or of the batch's contexts in all."""
    made: int
    """Tokens a step: computed of a prompt, or produced."""
    ns: int
    """Median of the steps."""
    best_ns: int

    @property
    def tokens_per_s(self) -> float:
        return self.made * 1e9 / self.ns


@dataclass(frozen=True, slots=True)
class Measured:
    conditions: dict[str, Any]
    prefill: list[Point]
    decode: list[Point]

    def profile(self) -> dict[str, Any]:
        """As JSON for the simulator: [tokens, ns] and [batch, context tokens, ns]. What the
        figures were measured on goes along, for people."""
        return {
            "profile": PROFILE,
            **self.conditions,
            "runs": [
                {
                    "tp": 1,
                    "prefill": [[point.tokens, point.ns] for point in self.prefill],
                    "decode": [[point.batch, point.tokens, point.ns] for point in self.decode],
                }
            ],
        }


def measure(directory: Path, plan: BenchPlan, options: ReplicaOptions, name: str = "") -> Measured:
    """Times `plan` on the prepared model `directory`; `name` is what it is called in the
    profile, by default what its own file calls it.

    All points take their turn in each round, so that a neighbour's burst of work does not
    fall on one of them. Raises ValueError (plan), InvalidField (model and device), OSError.
    """
    torch.set_num_threads(options.threads)
    arena = Arena.open(directory, options.weights)
    plan.check(arena.config.context_tokens)
    bench = StepBench(directory, arena, plan, options)
    prompts: dict[int, list[int]] = {tokens: [] for tokens in plan.prompts}
    timed: dict[tuple[int, int], list[int]] = {
        (batch, context): [] for batch in plan.batches for context in plan.contexts
    }
    bench.prefill(min(plan.prompts))
    for _ in range(plan.rounds):
        for tokens, times in prompts.items():
            times.append(bench.prefill(tokens))
        for (batch, context), times in timed.items():
            times += bench.decode(batch, context)
    # Steps of a round are timed at growing contexts; their median lies in the middle.
    growth = (plan.steps + 1) // 2
    return Measured(
        {
            "model": name or arena.config.name,
            "digest": arena.config.digest,
            "version": blitzd.__version__,
            "dtype": arena.config.dtype,
            "device": options.device,
            "threads": options.threads,
            "weights": options.weights,
            "rounds": plan.rounds,
            "steps": plan.steps,
        },
        [_point(0, n, n, times) for n, times in prompts.items()],
        [_point(b, b * (c + growth), b, times) for (b, c), times in timed.items()],
    )


def _point(batch: int, tokens: int, made: int, times: list[int]) -> Point:
    return Point(batch, tokens, made, round(statistics.median(times)), min(times))


class StepBench:
    """One replica's stepper, without a loop around it."""

    def __init__(
        self, directory: Path, arena: Arena, plan: BenchPlan, options: ReplicaOptions
    ) -> None:
        config = arena.config
        device = model_device(config, options)
        if device is not None:
            arena = Arena(config, arena.layout, arena.buffer, device)
        geometry = KvGeometry.of(config, plan.blocks)
        cache = KvCache(geometry, mmap.mmap(-1, geometry.bytes), device)
        cache.tensor.uniform_(-1.0, 1.0)
        scheduler = Scheduler(
            BlockManager(geometry.blocks, geometry.block_tokens),
            context_tokens=config.context_tokens,
            max_batch_tokens=max(*plan.prompts, *plan.batches),
            max_batch_size=max(plan.batches),
        )
        self._stepper = Stepper(
            build_executor(arena, cache, options),
            scheduler,
            Tokenizer.from_dir(directory),
            config.vocab,
        )
        self._steps = plan.steps
        self._vocab = config.vocab
        self._random = random.Random(0)
        self._requests = 0

    def prefill(self, tokens: int) -> int:
        """ns of the step that computes a prompt. None is like another: a prefix that is in
        the cache would not be computed."""
        self._stepper.prefill(self._request(tokens, 1), hold=False)
        return self._step(tokens)

    def decode(self, batch: int, context: int) -> list[int]:
        """ns of each step of `batch` requests that had `context` tokens before the first,
        which is not counted."""
        requests = [self._request(context - 1, self._steps + 3) for _ in range(batch)]
        for request in requests:
            request.output_tokens = [0]
            self._stepper.reserve(request)
            self._stepper.adopt(request.request_id, lease=1)
        self._step(batch)
        times = [self._step(batch) for _ in range(self._steps)]
        self._stepper.cancel([request.request_id for request in requests])
        return times

    def _request(self, tokens: int, max_tokens: int) -> pb.Request:
        self._requests += 1
        return pb.Request(
            request_id=self._requests,
            prompt_tokens=[self._random.randrange(self._vocab) for _ in range(tokens)],
            max_tokens=max_tokens,
            sampling=pb.Sampling(ignore_eos=True),
        )

    def _step(self, tokens: int) -> int:
        began = time.perf_counter_ns()
        step = self._stepper.begin()
        if step is None or step.plan.tokens != tokens:
            planned = 0 if step is None else step.plan.tokens
            raise RuntimeError(f"a step of {planned} tokens was planned, not of {tokens}")
        report = self._stepper.finish(step, self._stepper.compute(step))
        took = time.perf_counter_ns() - began
        if report.errors:
            raise RuntimeError(report.errors[0])
        return took
