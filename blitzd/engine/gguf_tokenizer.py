"""The tokenizer in a GGUF's metadata as a `tokenizer.json` of the `tokenizers` package."""

from __future__ import annotations

from typing import Any

import msgspec

from blitzd.engine.gguf import GgufError, Value
from blitzd.engine.gguf_sentencepiece import sentencepiece_parts

CONTROL, USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type."""

_BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
}  # fmt: skip

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _split_then_bytes(*patterns: str) -> list[dict[str, Any]]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return [*splits, {**_BYTE_LEVEL, "use_regex": False}]


_LLAMA3 = _split_then_bytes(_LLAMA3_SPLIT)
_QWEN2 = _split_then_bytes(_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}"))

_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    # What llama.cpp does with files that do not say: no model was trained with it.
    "default": _split_then_bytes(
        r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"
    ),
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""By tokenizer.ggml.pre."""
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")


def tokenizer_json(metadata: dict[str, Value]) -> bytes:
    """Raises GgufError naming what is not supported."""
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise GgufError(
            f"tokenizer.ggml.model is {model!r}; read are 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece's BPE)"
        )
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        raise GgufError(
            "tokenizer.ggml.add_eos_token is true: a prompt that ends cannot be gone on with"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    kinds = [kind for kind in kinds if isinstance(kind, int)] if isinstance(kinds, list) else []
    if len(kinds) != len(tokens):
        raise GgufError("tokenizer.ggml.token_type does not have one number a token")
    if model == "gpt2":
        parts = _byte_level_parts(metadata, tokens)
    else:
        parts = sentencepiece_parts(metadata, tokens, kinds)
    added = [
        {
            "id": i, "content": tokens[i], "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": kind == CONTROL,
        }
        for i, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED) and tokens[i]
    ]  # fmt: skip
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
    }
    return msgspec.json.encode(document | parts)


def special_ids(metadata: dict[str, Value]) -> tuple[int | None, int | None, bool]:
    """(the token that begins a text, the one that ends it, whether texts get the first), with
    what llama.cpp takes for keys that are not there."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    bos = metadata.get("tokenizer.ggml.bos_token_id", 1 if sentencepiece else None)
    eos = metadata.get("tokenizer.ggml.eos_token_id", 2 if sentencepiece else None)
    llama3 = metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    add = metadata.get("tokenizer.ggml.add_bos_token", sentencepiece or llama3)
    return (
        bos if isinstance(bos, int) else None,
        eos if isinstance(eos, int) else None,
        bool(add) and isinstance(bos, int),
    )


def _byte_level_parts(metadata: dict[str, Value], tokens: list[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise GgufError(f"tokenizer.ggml.pre is {pre!r}; supported are {known}")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise GgufError(
                f"tokenizer.ggml.merges has {merge[:80]!r}, not two tokens that make one"
            )
        merges.append((left, right))
    return {
        "normalizer": {"type": "NFC"} if pre in _QWEN2_NAMES else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _LLAMA3_NAMES,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _strings(metadata: dict[str, Value], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise GgufError(f"{key} is missing or not an array of strings")
    return [str(item) for item in value]
