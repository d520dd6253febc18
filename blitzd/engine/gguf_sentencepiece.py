"""SentencePiece's BPE in a GGUF's metadata (`tokenizer.ggml.model` "llama": Llama 2, Mistral) as
a `tokenizer.json`.

A GGUF has pieces and scores. SentencePiece joins, of all neighbours in a text, the two whose
piece has the highest score, the leftmost among equals; so a merge's rank is the order of scores.
As in llama.cpp, a space is put before every stretch of text between special tokens.
"""

from __future__ import annotations

import math
from typing import Any

from blitzd.engine.gguf import GgufError, Value

NORMAL, UNKNOWN, BYTE = 1, 2, 6
"""Values of tokenizer.ggml.token_type."""

MAX_SPLITS = 1 << 26
"""Characters that are looked at to find the merges; a vocabulary of 32,000 takes 3 million."""

SPACE = "▁"
_PREFIX = "tokenizer.ggml.add_space_prefix"


def sentencepiece_parts(
    metadata: dict[str, Value], tokens: list[str], kinds: list[int]
) -> dict[str, Any]:
    """Normalizer, decoder and model of a tokenizer.json. Raises GgufError naming what is not
    supported."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise GgufError("tokenizer.ggml.scores does not have one entry a token")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise GgufError("tokenizer.ggml.remove_extra_whitespaces true is not supported")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        raise GgufError(f"tokenizer.ggml.unknown_token_id is {unknown!r}")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise GgufError(f"tokenizer.ggml.tokens has {twice!r} twice")
    absent = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    prefix = bool(metadata.get(_PREFIX, True))
    decoders = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]  # fmt: skip
    normalizers = [{"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            # With a byte missing the package falls back for none of them.
            "byte_fallback": not absent,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(tokens, kinds, [_score(score) for score in scores]),
        },
    }


def _score(value: object) -> float:
    if not isinstance(value, int | float) or math.isnan(value):
        raise GgufError(f"tokenizer.ggml.scores has {value!r}")
    return float(value)


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a normal piece of two normal ones, the best piece first."""
    normal = {token: i for i, token in enumerate(tokens) if kinds[i] == NORMAL}
    if sum(len(token) ** 2 for token in normal) > MAX_SPLITS:
        raise GgufError("tokenizer.ggml.tokens has pieces that are too long to be merged")
    ranked = []
    for token, i in normal.items():
        for at in range(1, len(token)):
            left, right = normal.get(token[:at]), normal.get(token[at:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]
