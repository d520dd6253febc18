"""GGML's block formats to float32, bit for bit as the `gguf` package does it.

A block is a fixed number of neighbours in a row that share scales. The order of the
float32 operations below is part of the format: (d * q) + m is not d * q + m fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[Any]
"""A structured array, one record a block."""
Floats = NDArray[np.float32]


class QuantType(NamedTuple):
    name: str
    block_elements: int
    record: np.dtype[Any]
    expand: Callable[[Blocks, Floats], None]
    """Fills float32 [blocks, block_elements] from the records."""

    @property
    def block_bytes(self) -> int:
        return self.record.itemsize


def dequantise(raw: NDArray[np.uint8], quant: QuantType) -> Floats:
    """`raw` (whole blocks) as float32 [blocks, block_elements]."""
    blocks = raw.view(quant.record)
    out = np.empty((len(blocks), quant.block_elements), np.float32)
    quant.expand(blocks, out)
    return out


def _scale(column: Blocks) -> Floats:
    return column.astype(np.float32).reshape(-1, 1)


def _plain(blocks: Blocks, out: Floats) -> None:
    out[:, 0] = blocks["x"]


def _bf16(blocks: Blocks, out: Floats) -> None:
    np.left_shift(blocks["x"], np.uint32(16), out=out.view(np.uint32)[:, 0])


def _q8_0(blocks: Blocks, out: Floats) -> None:
    np.multiply(blocks["q"], _scale(blocks["d"]), out=out)


def _q4_0(blocks: Blocks, out: Floats) -> None:
    nibbles, d = blocks["q"], _scale(blocks["d"])
    eight = np.int8(8)
    np.multiply((nibbles & 15).view(np.int8) - eight, d, out=out[:, :16])
    np.multiply((nibbles >> 4).view(np.int8) - eight, d, out=out[:, 16:])


def _q4_1(blocks: Blocks, out: Floats) -> None:
    nibbles, d = blocks["q"], _scale(blocks["d"])
    np.multiply(nibbles & 15, d, out=out[:, :16])
    np.multiply(nibbles >> 4, d, out=out[:, 16:])
    out += _scale(blocks["m"])


def _q4_k(blocks: Blocks, out: Floats) -> None:
    """256 elements in 8 groups of 32; 6-bit scales and minima are packed in 12 bytes:
    four of each in the low 6 bits of bytes 0-7, the other four split between bytes 8-11
    and the high 2 bits of bytes 0-7."""
    low_d, low_m, rest = (blocks["s"][:, i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([low_d & 63, (rest & 15) | ((low_d >> 2) & 48)], axis=1)
    minima = np.concatenate([low_m & 63, (rest >> 4) | ((low_m >> 2) & 48)], axis=1)
    d = (_scale(blocks["d"]) * scales.astype(np.float32))[:, :, None]
    m = (_scale(blocks["m"]) * minima.astype(np.float32))[:, :, None]
    nibbles = blocks["q"].reshape(-1, 4, 32)
    groups = out.reshape(-1, 8, 32)
    np.multiply(nibbles & 15, d[:, 0::2], out=groups[:, 0::2])
    np.multiply(nibbles >> 4, d[:, 1::2], out=groups[:, 1::2])
    groups -= m


def _q6_k(blocks: Blocks, out: Floats) -> None:
    """256 elements in 16 groups of 16; the low 4 bits and the high 2 lie apart."""
    low: Blocks = blocks["l"].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(
        1, 1, 2, 1
    )
    high: Blocks = blocks["h"].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(
        1, 1, 4, 1
    )
    low = (low & 15).reshape(-1, 16, 16)
    high = (high & 3).reshape(-1, 16, 16) << 4
    d = _scale(blocks["d"]) * blocks["s"].astype(np.float32)
    np.multiply(
        (low | high).view(np.int8) - np.int8(32), d[:, :, None], out=out.reshape(-1, 16, 16)
    )


def _type(
    name: str, elements: int, expand: Callable[[Blocks, Floats], None], *fields: tuple[Any, ...]
) -> QuantType:
    return QuantType(name, elements, np.dtype(list(fields)), expand)


QUANT_TYPES: dict[int, QuantType] = {
    0: _type("F32", 1, _plain, ("x", "<f4")),
    1: _type("F16", 1, _plain, ("x", "<f2")),
    2: _type("Q4_0", 32, _q4_0, ("d", "<f2"), ("q", "u1", 16)),
    3: _type("Q4_1", 32, _q4_1, ("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)),
    8: _type("Q8_0", 32, _q8_0, ("d", "<f2"), ("q", "i1", 32)),
    12: _type("Q4_K", 256, _q4_k, ("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("q", "u1", 128)),
    14: _type("Q6_K", 256, _q6_k, ("l", "u1", 128), ("h", "u1", 64), ("s", "i1", 16), ("d", "<f2")),
    30: _type("BF16", 1, _bf16, ("x", "<u2")),
}
"""Supported types by GGML's number."""

_OTHERS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def type_name(kind: int) -> str:
    """GGML's name of a type number, for error messages."""
    quant = QUANT_TYPES.get(kind)
    return quant.name if quant else _OTHERS.get(kind, f"number {kind}, which is unknown")
