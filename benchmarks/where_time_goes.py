"""What a step's time is spent on: products, attention, sampling, the rest.

    .venv/bin/python benchmarks/where_time_goes.py [--dtype float32] [--weights copy] [--steps 8]

Runs the steps that a replica runs (scheduler, forward pass, sampling, text) on one thread and
counts that thread's own CPU time, each part without the parts that it calls. Percentages of
the whole step; the best of the steps, by total.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blitzd.engine import attention, executor, llama, scoring, stepper
from blitzd.engine.arena import Arena
from blitzd.engine.bench import BenchPlan, StepBench
from blitzd.engine.catalogue import DEFAULT_MODEL, prepared_dir, pull
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.prepare import prepare
from blitzd.proto.blitzd.engine import v1 as pb

HEAD, PRODUCTS = "output head", "products"
PARTS = (PRODUCTS, "attention", "norms, rotary, silu", HEAD, "sampling", "attention plan", "rest")
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1}


class Clock:
    """Charges the thread's CPU time to whatever is innermost."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._stack = ["rest"]
        self._since = time.thread_time_ns()

    def _charge(self) -> None:
        now = time.thread_time_ns()
        self.spent[self._stack[-1]] += now - self._since
        self._since = now

    def take(self) -> Counter[str]:
        self._charge()
        spent, self.spent = self.spent, Counter()
        return spent

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Everything that runs in `owner.name` is `part`; products for the head are the
        head's."""
        plain: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._stack.append(HEAD if self._stack[-1] == HEAD else part)
            try:
                return plain(*args, **kwargs)
            finally:
                self._charge()
                self._stack.pop()

        setattr(owner, name, timed)


class Watched(StepBench):
    """The same steps, with any sampling, and each one's parts."""

    clock: Clock
    sampling: dict[str, Any]

    def _request(self, tokens: int, max_tokens: int) -> pb.Request:
        request = super()._request(tokens, max_tokens)
        request.sampling = pb.Sampling(ignore_eos=True, **self.sampling)
        return request

    def _step(self, tokens: int) -> int:
        self.clock.take()
        took = super()._step(tokens)
        self.seen.append(self.clock.take())
        return took

    def best(self, run: Callable[[], Any], skip: int = 0) -> Counter[str]:
        self.seen: list[Counter[str]] = []
        run()
        return min(self.seen[skip:], key=lambda spent: sum(spent.values()))


def watched(asked: argparse.Namespace) -> Watched:
    directory = prepare(pull(DEFAULT_MODEL), asked.dtype, prepared_dir())
    plan = BenchPlan([1, 4, 8], [128, 512, 1024], [64, 512, 1024], 1, asked.steps)
    clock = Clock()
    for owner, name, part in (
        (llama, "project", PRODUCTS),
        (attention.TorchAttention, "run", "attention"),
        (attention.TorchAttention, "plan", "attention plan"),
        (llama.Llama, "run_layers", "norms, rotary, silu"),
        (llama.Llama, "logits", HEAD),
        (scoring, "sample", "sampling"),
        (executor, "choose", "sampling"),
        (stepper.Stepper, "finish", "rest"),
    ):
        clock.watch(owner, name, part)
    arena = Arena.open(directory, asked.weights)
    bench = Watched(directory, arena, plan, ReplicaOptions(weights=asked.weights))
    bench.clock, bench.sampling = clock, {}
    return bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--weights", choices=("copy", "map"), default="copy")
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bench = watched(asked)
    print(f"{asked.dtype}, weights={asked.weights}, 1 thread, load {os.getloadavg()[0]:.1f}")
    print(f"{'':28}{'CPU ms':>9}  " + "".join(f"{part:>21}" for part in PARTS))
    cases: list[tuple[str, int, int, dict[str, Any]]] = [
        ("prompt of 512", 0, 512, {}),
        ("prompt of 1024", 0, 1024, {}),
        ("decode 1 at 128", 1, 128, {}),
        ("decode 1 at 1024", 1, 1024, {}),
        ("decode 8 at 128", 8, 128, {}),
        ("decode 8 at 1024", 8, 1024, {}),
        ("decode 8 at 128, top-p", 8, 128, SAMPLED),
    ]
    for name, batch, context, sampling in cases:
        bench.sampling = sampling
        if batch:
            spent = bench.best(lambda b=batch, c=context: bench.decode(b, c), skip=1)
        else:
            spent = bench.best(lambda c=context: [bench.prefill(c) for _ in range(3)], skip=1)
        print(line(name, spent), flush=True)


def line(name: str, spent: Counter[str]) -> str:
    whole = sum(spent.values())
    shares = "".join(f"{spent[part] / whole:>20.1%} " for part in PARTS)
    return f"{name:28}{whole / 1e6:9.1f}  {shares}"


if __name__ == "__main__":
    main()
