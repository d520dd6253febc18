"""Our forward pass beside llama.cpp's, same bfloat16 weights, same threads, in turns.

    python3 -m venv /tmp/llamacpp && /tmp/llamacpp/bin/pip install numpy llama-cpp-python==0.3.36
    .venv/bin/python benchmarks/make_bf16_gguf.py /tmp/smollm2-bf16.gguf
    .venv/bin/python benchmarks/bench_llamacpp.py /tmp/llamacpp/bin/python /tmp/smollm2-bf16.gguf

llama-cpp-python is built from source: about eight minutes on two cores. Both sides are timed
from token ids to the next token's id. CPU seconds are what to compare on a machine with other
tenants; at one thread they are the time that a machine of one's own would take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blitzd.engine.batch import BatchLayout
from blitzd.engine.catalogue import DEFAULT_MODEL, prepared_dir, pull
from blitzd.engine.prepare import prepare
from tests.engines import Engine

PEER = Path(__file__).with_name("llamacpp_peer.py")
BLOCK = 64


class Case(NamedTuple):
    name: str
    batch: int
    """0: a prompt."""
    context: int
    steps: int

    @property
    def tokens(self) -> int:
        return self.steps * (self.batch or self.context)


CASES = [
    Case("prefill 512", 0, 512, 1),
    Case("decode batch 1 at 128", 1, 128, 12),
    Case("decode batch 8 at 128", 8, 128, 12),
    Case("decode batch 1 at 1024", 1, 1024, 12),
    Case("decode batch 8 at 1024", 8, 1024, 12),
]
LONGEST = max(case.context for case in CASES)


class Ours:
    def __init__(self, dtype: Any) -> None:
        directory = prepare(pull(DEFAULT_MODEL), dtype, prepared_dir())
        each = -(-LONGEST // BLOCK) + 1
        self._engine = Engine(directory, blocks=8 * each, block_tokens=BLOCK, copy=True)
        # What was never written is one page of zeros, which reads faster than memory.
        self._engine.cache.tensor.uniform_(-1.0, 1.0)
        self._tables = [list(range(i * each, (i + 1) * each)) for i in range(8)]

    def run(self, case: Case) -> tuple[float, float]:
        began = time.perf_counter(), time.process_time()
        ids = [1] * case.batch
        for step in range(1, case.steps + 1):
            if case.batch:
                context = [case.context + step] * case.batch
                layout = BatchLayout([1] * case.batch, context, self._tables[: case.batch])
                hidden = self._engine.step(layout, ids)
            else:
                layout = BatchLayout([case.context], [case.context], self._tables[:1])
                hidden = self._engine.step(layout, list(range(100, 100 + case.context)))[-1:]
            ids = self._engine.model.logits(hidden).argmax(-1).tolist()
        return time.perf_counter() - began[0], time.process_time() - began[1]


class Theirs:
    def __init__(self, python: str, gguf: Path, threads: int) -> None:
        command = [python, str(PEER), str(gguf), str(threads), str(LONGEST)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version: str = self._answer()

    def run(self, case: Case) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case.batch, case.context, case.steps]) + "\n")
        self._process.stdin.flush()
        wall, cpu = self._answer()
        return wall, cpu

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp ended; its message is above")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python", help="of the environment that has llama-cpp-python")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    ours, theirs = Ours(asked.dtype), Theirs(asked.python, asked.gguf, asked.threads)
    print(
        f"blitzd {asked.dtype} beside llama-cpp-python {theirs.version} {asked.gguf.name}, "
        f"{asked.threads} threads each, {asked.rounds} rounds in turns; load before "
        f"{os.getloadavg()[0]:.1f}"
    )
    print(f"{'':24}{'ours':>10}{'llama.cpp':>11}  tokens/CPU-s;  ratio by CPU, by wall (best)")
    try:
        for case in CASES:
            ours.run(case), theirs.run(case)
            rounds = [(ours.run(case), theirs.run(case)) for _ in range(asked.rounds)]
            print(line(case, rounds), flush=True)
    finally:
        theirs.close()
    print(f"load after {os.getloadavg()[0]:.1f}")


def line(case: Case, rounds: list[tuple[tuple[float, float], tuple[float, float]]]) -> str:
    mine, other = (statistics.median(pair[side][1] for pair in rounds) for side in (0, 1))
    best = [min(pair[side][0] for pair in rounds) for side in (0, 1)]
    return (
        f"{case.name:24}{case.tokens / mine:10.1f}{case.tokens / other:11.1f}"
        f"{'':16}{other / mine:10.2f}{best[1] / best[0]:10.2f}"
    )


if __name__ == "__main__":
    main()
