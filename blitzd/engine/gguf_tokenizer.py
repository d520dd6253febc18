"""The tokenizer in a GGUF's metadata as a `tokenizer.json` of the `tokenizers` package."""

from __future__ import annotations

from typing import Any

import msgspec

from blitzd.engine.gguf import GgufError, Value

CONTROL, USER_DEFINED = 3, 4
"""Values of tokenizer.ggml.token_type."""

_BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
}  # fmt: skip

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_then_bytes(pattern: str) -> list[dict[str, Any]]:
    split = {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    return [split, {**_BYTE_LEVEL, "use_regex": False}]


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": [_BYTE_LEVEL],
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "llama-bpe": _split_then_bytes(_LLAMA3_SPLIT),
    "qwen2": _split_then_bytes(_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")),
}


def tokenizer_json(metadata: dict[str, Value]) -> bytes:
    """Raises GgufError naming what is not supported."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise GgufError(f"tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE) is read")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise GgufError(f"tokenizer.ggml.pre is {pre!r}; supported are {known}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    merges = [merge.split(" ", 1) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise GgufError("tokenizer.ggml.token_type does not have one entry a token")
    added = [
        {
            "id": i, "content": tokens[i], "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": kind == CONTROL,
        }
        for i, kind in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    return msgspec.json.encode(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
            "post_processor": None,
            "decoder": _BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": pre == "llama-bpe",
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": merges,
            },
        }
    )


def _strings(metadata: dict[str, Value], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise GgufError(f"{key} is missing or not an array of strings")
    return [str(item) for item in value]
