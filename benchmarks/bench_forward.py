"""Our forward pass beside Hugging Face transformers', same weights, same threads, in turns.

Prints tokens per second of both and their ratio, which is what counts: seconds depend on
the machine and on its other tenants.

    .venv/bin/python benchmarks/bench_forward.py [--threads 2] [--rounds 5] [--clock cpu]

On a machine with other tenants, `--threads 1 --clock cpu` counts the thread's own time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blitzd.engine.batch import BatchLayout
from blitzd.engine.catalogue import DEFAULT_MODEL, prepared_dir, pull
from blitzd.engine.prepare import prepare
from tests.engines import Engine
from tests.reference import reference_model

BLOCK = 64
CLOCK = time.perf_counter
DECODE_STEPS = 8

Timed = Callable[[], float]
"""Runs once and gives seconds."""


def ours_decode(engine: Engine, lengths: list[int]) -> Timed:
    """Steps of a batch whose contexts have `lengths`; cache contents do not matter."""
    each = [-(-(length + DECODE_STEPS) // BLOCK) for length in lengths]
    starts = [sum(each[:i]) for i in range(len(each))]
    tables = [list(range(a, a + n)) for a, n in zip(starts, each, strict=True)]

    def run() -> float:
        start = CLOCK()
        ids = [1] * len(lengths)
        for step in range(1, DECODE_STEPS + 1):
            batch = BatchLayout([1] * len(lengths), [n + step for n in lengths], tables)
            ids = engine.model.logits(engine.step(batch, ids)).argmax(-1).tolist()
        return CLOCK() - start

    return run


def theirs_decode(model: LlamaForCausalLM, lengths: list[int]) -> Timed:
    """The same with left padding, which is what transformers does with unequal lengths."""
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    position = torch.tensor(lengths)
    padded = len(set(lengths)) > 1

    @torch.inference_mode()
    def run() -> float:
        cache = DynamicCache(config=model.config)
        shape = (len(lengths), model.config.num_key_value_heads, longest, model.config.head_dim)
        for layer in range(model.config.num_hidden_layers):
            cache.update(torch.zeros(shape), torch.zeros(shape), layer)
        start = CLOCK()
        step_ids = torch.ones(len(lengths), 1, dtype=torch.long)
        for step in range(DECODE_STEPS):
            grown = torch.cat([mask, torch.ones(len(lengths), step + 1, dtype=torch.long)], 1)
            extra = {"attention_mask": grown} if padded else {}
            extra["position_ids"] = position[:, None] + step
            out = model(
                step_ids,
                cache=cache,
                use_cache=True,
                **extra,
            )
            cache = out.past_key_values
            step_ids = out.logits[:, -1].argmax(-1, keepdim=True)
        return CLOCK() - start

    return run


def ours_prefill(engine: Engine, tokens: int) -> Timed:
    table = [list(range(-(-tokens // BLOCK)))]
    ids = list(range(100, 100 + tokens))

    def run() -> float:
        start = CLOCK()
        hidden = engine.step(BatchLayout([tokens], [tokens], table), ids)
        engine.model.logits(hidden[-1:])
        return CLOCK() - start

    return run


def theirs_prefill(model: LlamaForCausalLM, tokens: int) -> Timed:
    ids = torch.arange(100, 100 + tokens)[None]

    @torch.inference_mode()
    def run() -> float:
        start = CLOCK()
        model(ids, use_cache=True, logits_to_keep=1)
        return CLOCK() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--weights", choices=("copy", "map"), default="copy")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    if options.clock == "cpu":
        global CLOCK
        CLOCK = time.thread_time
    torch.set_num_threads(options.threads)
    directory = prepare(pull(DEFAULT_MODEL), "float32", prepared_dir())
    engine = Engine(directory, blocks=256, block_tokens=BLOCK, copy=options.weights == "copy")
    model = reference_model(engine.arena)
    spread = [16, 50, 84, 118, 153, 187, 221, 256]
    ragged = [16, 32, 64, 100, 200, 400, 800, 1500]
    cases: list[tuple[str, int, Timed, Timed]] = [
        ("prefill 512", 512, ours_prefill(engine, 512), theirs_prefill(model, 512)),
    ]
    for name, lengths in [
        ("decode batch 1 at 128", [128]),
        ("decode batch 1 at 1024", [1024]),
        ("decode batch 8 at 128", [128] * 8),
        ("decode batch 8 at 16..256", spread),
        ("decode batch 8 at 16..1500", ragged),
        ("decode batch 32 at 128", [128] * 32),
    ]:
        tokens = len(lengths) * DECODE_STEPS
        cases.append((name, tokens, ours_decode(engine, lengths), theirs_decode(model, lengths)))
    print(
        f"{options.threads} threads, {options.clock} time, weights={options.weights}, "
        f"{options.rounds} rounds in turns, tokens/s (best, median)"
    )
    for name, tokens, ours, theirs in cases:
        if options.only not in name:
            continue
        ours(), theirs()
        times = [(ours(), theirs()) for _ in range(options.rounds)]
        mine, other = ([pair[side] for pair in times] for side in (0, 1))
        ratio = statistics.median(b / a for a, b in times)
        print(
            f"{name:28} ours {tokens / min(mine):7.1f} {tokens / statistics.median(mine):7.1f}"
            f"   transformers {tokens / min(other):7.1f} {tokens / statistics.median(other):7.1f}"
            f"   ratio {ratio:.2f} (best/best {min(other) / min(mine):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
