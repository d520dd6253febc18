"""Small GGUF files for tests, written by the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from numpy.typing import NDArray

from blitzd.engine.tokenizer import BYTE_OF_CHARACTER

Pieces = list[tuple[str, float, int]]
"""(text, score, type) of each."""
QuantisedTensor = tuple[NDArray[Any], GGMLQuantizationType]


def random_blocks(
    kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0
) -> NDArray[np.uint8]:
    """Random bytes that are valid blocks: every bit pattern of the quants and of the packed
    scales, and finite float16 scales."""
    elements, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    scales = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
    for at in scales.get(kind.name, []):
        values = random.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, columns // elements * size)


def quantised(values: NDArray[Any], kind: GGMLQuantizationType) -> QuantisedTensor:
    return quantize(values.astype(np.float32), kind), kind


def write_gguf(
    path: Path,
    tensors: dict[str, QuantisedTensor],
    *,
    architecture: str = "llama",
    numbers: dict[str, int | float] | None = None,
    texts: dict[str, str] | None = None,
    pieces: Pieces | None = None,
) -> Path:
    """A complete file: a byte-level vocabulary or SentencePiece's `pieces`, `numbers` under
    the architecture's prefix, `texts` as they are."""
    writer = GGUFWriter(path, architecture)
    for key, value in (numbers or {}).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    for key, text in (texts or {}).items():
        writer.add_string(key, text)
    if pieces is None:
        _add_byte_level(writer, pre="tokenizer.ggml.pre" not in (texts or {}))
    else:
        _add_pieces(writer, pieces)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_byte_level(writer: GGUFWriter, pre: bool) -> None:
    writer.add_string("tokenizer.ggml.model", "gpt2")
    if pre:
        writer.add_string("tokenizer.ggml.pre", "gpt-2")
    by_byte = sorted(BYTE_OF_CHARACTER, key=lambda character: BYTE_OF_CHARACTER[character])
    tokens = [*by_byte, "he", "<|im_end|>", "<|im_start|>"]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [1] * 257 + [3, 3])
    writer.add_array("tokenizer.ggml.merges", ["h e"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 257)


def _add_pieces(writer: GGUFWriter, pieces: Pieces) -> None:
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_array("tokenizer.ggml.tokens", [text for text, _, _ in pieces])
    writer.add_array("tokenizer.ggml.scores", [float(score) for _, score, _ in pieces])
    writer.add_array("tokenizer.ggml.token_type", [kind for _, _, kind in pieces])


SHAPES: dict[str, int | float] = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def tiny_weights(seed: int = 0, bias: bool = False) -> dict[str, NDArray[np.float32]]:
    """Tensors of the model that SHAPES describes, by GGUF name."""
    random = np.random.default_rng(seed)
    hidden, ffn, q, kv, vocab = 256, 512, 256, 128, 259
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
    }
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (hidden,),
            f"blk.{i}.attn_q.weight": (q, hidden),
            f"blk.{i}.attn_k.weight": (kv, hidden),
            f"blk.{i}.attn_v.weight": (kv, hidden),
            f"blk.{i}.attn_output.weight": (hidden, q),
            f"blk.{i}.ffn_norm.weight": (hidden,),
            f"blk.{i}.ffn_gate.weight": (ffn, hidden),
            f"blk.{i}.ffn_up.weight": (ffn, hidden),
            f"blk.{i}.ffn_down.weight": (hidden, ffn),
        }
        if bias:
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"blk.{i}.attn_{part}.bias"] = (rows,)
    return {
        name: random.standard_normal(shape).astype(np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in shapes.items()
    }


def tiny_gguf(
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    architecture: str = "llama",
    bias: bool = False,
    drop: str = "",
    extra: dict[str, QuantisedTensor] | None = None,
    numbers: dict[str, int | float] | None = None,
    texts: dict[str, str] | None = None,
) -> Path:
    """A two-layer model; matrices of `kind`, vectors F32, less tensor `drop`."""
    tensors = {
        name: quantised(values, kind if values.ndim > 1 else GGMLQuantizationType.F32)
        for name, values in tiny_weights(bias=bias).items()
        if name != drop
    }
    return write_gguf(
        path,
        tensors | (extra or {}),
        architecture=architecture,
        numbers=SHAPES | (numbers or {}),
        texts=texts,
    )
