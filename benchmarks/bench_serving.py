"""The daemon over HTTP beside Hugging Face transformers, same weights, in turns.

    .venv/bin/python benchmarks/bench_serving.py [--rounds 3]

blitzd runs one prefill and one decode worker with one compute thread each; transformers
runs with one thread and with two. What counts is the ratio: seconds depend on the machine
and on its other tenants. Prints the median of the rounds.

Spread lengths: requests whose prompts and answers have 16 to 256 tokens each, at most 8
at a time. transformers takes them in batches of 8, left-padded, each run to its longest
answer; tokens that nobody asked for do not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blitzd.engine.arena import Arena
from blitzd.engine.catalogue import DEFAULT_MODEL, prepared_dir, pull
from blitzd.engine.prepare import prepare
from tests.e2e.daemon import Daemon
from tests.reference import reference_model

TOGETHER = 8


@dataclass(frozen=True)
class Job:
    prompt: list[int]
    new_tokens: int


def job(seed: int, prompt_tokens: int, new_tokens: int) -> Job:
    drawn = random.Random(seed)
    return Job([drawn.randrange(1000, 40_000) for _ in range(prompt_tokens)], new_tokens)


class Blitzd:
    name = "blitzd"

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def single(self, one: Job) -> tuple[float, float]:
        """TTFT and TPOT in seconds, as a client sees them."""
        body = self._body(one)
        started = time.perf_counter()
        stamps = [
            time.perf_counter()
            for chunk in self._daemon.stream("/v1/completions", body)
            if chunk["choices"][0]["text"]
        ]
        return stamps[0] - started, (stamps[-1] - stamps[0]) / max(1, one.new_tokens - 1)

    def many(self, jobs: list[Job]) -> float:
        """Seconds for all, at most 8 at a time."""
        started = time.perf_counter()
        with ThreadPoolExecutor(TOGETHER) as clients:
            list(clients.map(lambda one: self._daemon.complete(**self._body(one)), jobs))
        return time.perf_counter() - started

    def _body(self, one: Job) -> dict[str, Any]:
        wanted = {"max_tokens": one.new_tokens, "temperature": 0, "ignore_eos": True}
        return {"prompt": one.prompt, **wanted}


class Transformers:
    def __init__(self, model: Any, threads: int) -> None:
        self.name = f"transformers, {threads} thread" + ("s" if threads > 1 else "")
        self._model = model
        self._threads = threads

    def single(self, one: Job) -> tuple[float, float]:
        first = self._generate([Job(one.prompt, 1)])
        whole = self._generate([one])
        return first, (whole - first) / max(1, one.new_tokens - 1)

    def many(self, jobs: list[Job]) -> float:
        return sum(
            self._generate(jobs[start : start + TOGETHER])
            for start in range(0, len(jobs), TOGETHER)
        )

    def _generate(self, jobs: list[Job]) -> float:
        torch.set_num_threads(self._threads)
        width = max(len(one.prompt) for one in jobs)
        ids = torch.tensor([[0] * (width - len(one.prompt)) + one.prompt for one in jobs])
        mask = torch.tensor(
            [[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in jobs]
        )
        longest = max(one.new_tokens for one in jobs)
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=longest,
                min_new_tokens=longest,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - started


Engine = Blitzd | Transformers


def measurements(engine: Engine, repeat: int) -> dict[str, float]:
    """Higher is better in each. Prompts differ between rounds, so that no cache helps."""
    ttft, tpot = engine.single(job(repeat, 64, 48))
    equal = [job(1000 + 100 * repeat + i, 64, 32) for i in range(TOGETHER)]
    drawn = random.Random(7)
    spread = [
        job(5000 + 100 * repeat + i, drawn.randint(16, 256), drawn.randint(16, 256))
        for i in range(2 * TOGETHER)
    ]
    long = engine.single(job(9000 + repeat, 512, 1))[0]
    return {
        "1 / TTFT, 64-token prompt": 1 / ttft,
        "decode tokens/s, 1 stream (1 / TPOT)": 1 / tpot,
        "tokens/s, 8 equal": TOGETHER * 32 / engine.many(equal),
        "tokens/s, 16 spread": sum(one.new_tokens for one in spread) / engine.many(spread),
        "prefill tokens/s at 512": 512 / long,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    model_dir = prepare(pull(DEFAULT_MODEL), "float32", prepared_dir())
    reference = reference_model(Arena.open(model_dir))
    with tempfile.TemporaryDirectory() as scratch:
        daemon = Daemon(Path(scratch) / "state", "--spare", "0").start()
        try:
            daemon.ready()
            engines = [Blitzd(daemon), Transformers(reference, 1), Transformers(reference, 2)]
            report(engines, rounds, measurements)
        finally:
            daemon.end()


def report(
    engines: list[Any], rounds: int, measure: Callable[[Any, int], dict[str, float]]
) -> None:
    seen: dict[str, dict[str, list[float]]] = {}
    for repeat in range(rounds):
        for engine in engines:
            for what, value in measure(engine, repeat).items():
                print(f"  round {repeat + 1}, {engine.name}: {what} {value:.2f}", flush=True)
                seen.setdefault(what, {}).setdefault(engine.name, []).append(value)
    for what, by_engine in seen.items():
        medians = {name: statistics.median(values) for name, values in by_engine.items()}
        ours = medians.pop(engines[0].name)
        print(f"{what}: {engines[0].name} {ours:.2f}")
        for name, theirs in medians.items():
            print(f"    {name} {theirs:.2f}   ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
