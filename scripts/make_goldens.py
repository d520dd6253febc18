"""Makes tests/data/goldens/: what transformers answers to fixed prompts, greedily.

The model is Hugging Face's LlamaForCausalLM in float32, filled with the weights that our
GGUF reader dequantised (which the tests hold bit for bit against the `gguf` package);
the prompts are tokenised by transformers' own reading of the same GGUF. A prompt is kept
only when the two best logits never come closer than MIN_GAP, so that a difference of
summation order cannot change a token.

    .venv/bin/python scripts/make_goldens.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from blitzd.engine.arena import Arena  # noqa: E402
from blitzd.engine.catalogue import prepared_dir, pull  # noqa: E402
from blitzd.engine.prepare import prepare  # noqa: E402
from blitzd.engine.tokenizer import Tokenizer  # noqa: E402
from tests.reference import reference_model  # noqa: E402

MODEL = "smollm2-135m"
MIN_GAP = 1e-3
NEW_TOKENS = 64

CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three uses for a brick.",
    "Explain photosynthesis to a child in two sentences.",
    "Was ist der Unterschied zwischen „groß“ und „klein“?",
    "为什么天空是蓝色的？",
    "¿Cuántos días tiene un año bisiesto? ¡Explícalo!",
    "Почему снег белый?",
    "Tell me about 🐙 and 🦑 — are they related? 👩🏽‍🚀",
    "Write a Python function that reverses a string.",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
]
PLAIN = [
    "Once upon a time",
    "The",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n",
    "In 1969, the first humans to walk on the Moon were",
    "Naïve café owners in São Paulo say that",
    "東京は日本の",
    "1, 2, 3, 5, 8, 13,",
    "\n",
    "SELECT name, COUNT(*) FROM users",
    "Q: What is 12 times 12?\nA:",
    "The three primary colours are",
]
ONE_TOKEN = ["The", " In", "import", "Hello", " She", "A", "What", "\n", "class", "def"]
LENGTHS = [63, 64, 65, 127, 128, 129, 256, 300, 512, 777, 1000, 1024, 1500]
LONG_LENGTHS = [2048, 3000, 4000]

SENTENCES = [
    "The river {n} runs from the hills to the old harbour, where ships once unloaded salt.",
    "In the year {n} a clockmaker from Zürich built a machine that could count sheep.",
    "Nobody in the village remembers why the bridge has {n} arches and only one lamp.",
    "A letter dated {n} mentions naïve travellers, a façade of glass, and a lost violin.",
    "Every morning {n} bakers open their shops; the smell of bread reaches the station.",
    "The library keeps {n} maps, most of them wrong, all of them beautiful.",
    "When the tower was measured it was {n} steps high, counting the broken ones.",
    "Scientists placed {n} sensors along the coast to listen to the tides.",
]


def long_text(seed: int, sentences: int) -> str:
    return " ".join(
        SENTENCES[(i * (seed % 7 + 1) + seed) % len(SENTENCES)].format(n=17 + seed * 31 + i * i)
        for i in range(sentences)
    )


def of_length(tokenizer: Tokenizer, length: int) -> Iterator[str]:
    """Plain prompts of exactly `length` tokens, one per seed."""
    for seed in range(40):
        ids = tokenizer.encode(long_text(seed, length // 8 + 8))[:length]
        text = tokenizer.decode(ids)
        if len(tokenizer.encode(text)) == length:
            yield text


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, ids: list[int]) -> tuple[list[int], float]:
    """The next NEW_TOKENS and the smallest gap, or fewer once the gap is too small."""
    tokens: list[int] = []
    smallest, cache, step = float("inf"), None, torch.tensor([ids])
    while len(tokens) < NEW_TOKENS and smallest >= MIN_GAP:
        out = model(step, cache=cache, use_cache=True, logits_to_keep=1)
        best = out.logits[0, -1].topk(2)
        smallest = min(smallest, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        cache, step = out.past_key_values, best.indices[None, :1]
    return tokens, smallest


def main() -> None:
    torch.set_num_threads(1)
    gguf = pull(MODEL)
    directory = prepare(gguf, "float32", prepared_dir())
    tokenizer = Tokenizer.from_dir(directory)
    arena = Arena.open(directory)
    model = reference_model(arena)
    theirs = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    cases: list[dict[str, Any]] = []

    def keep(kind: str, name: str, prompt: str, messages: list[dict[str, str]] | None) -> bool:
        ids = tokenizer.encode(prompt)
        expected = theirs.encode(prompt, add_special_tokens=False)
        if ids != expected:
            raise SystemExit(f"{name}: our ids differ from transformers'")
        tokens, gap = greedy(model, ids)
        kept = "kept" if gap >= MIN_GAP else "dropped"
        print(f"{name}: {len(ids)} tokens, gap {gap:.4f}, {kept}", flush=True)
        if gap < MIN_GAP:
            return False
        case = {"name": name, "kind": kind, "prompt": prompt, "prompt_ids": ids}
        case |= {"messages": messages} if messages else {}
        cases.append(case | {"output_ids": tokens, "smallest_gap": gap})
        return True

    for index, text in enumerate(CHATS):
        messages = [{"role": "user", "content": text}]
        keep("chat", f"chat-{index}", tokenizer.render_chat(messages), messages)
    for index, text in enumerate(PLAIN):
        keep("plain", f"plain-{index}", text, None)
    next(t for t in ONE_TOKEN if len(tokenizer.encode(t)) == 1 and keep("plain", "one", t, None))
    for length in [*LENGTHS, *LONG_LENGTHS]:
        kind = "long" if length in LONG_LENGTHS else "plain"
        texts = of_length(tokenizer, length)
        if not any(keep(kind, f"length-{length}", text, None) for text in texts):
            raise SystemExit(f"no prompt of {length} tokens keeps its distance")
    target = ROOT / "tests/data/goldens" / f"{MODEL}-float32.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    document = {"model": MODEL, "digest": arena.config.digest, "cases": cases}
    target.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n")
    print(f"{len(cases)} cases in {target}")


if __name__ == "__main__":
    main()
