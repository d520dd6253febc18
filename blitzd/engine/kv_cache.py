"""Keys and values of all running requests, in blocks of tokens.

One shared buffer, [layers, 2, blocks, block_tokens, kv_heads, head_dim]: keys and values
apart, so that neighbouring blocks form one stretch of tokens that attention can read
where it lies. Each [blocks, block_tokens, kv_heads, head_dim] plane is what FlashInfer
calls NHD.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blitzd.engine.arena import TORCH_DTYPES, Buffer
from blitzd.engine.model_config import DTYPE_BYTES, Dtype, ModelConfig

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class KvGeometry:
    layers: int
    blocks: int
    kv_heads: int
    head_dim: int
    dtype: Dtype
    block_tokens: int = BLOCK_TOKENS

    @classmethod
    def of(cls, config: ModelConfig, blocks: int, block_tokens: int = BLOCK_TOKENS) -> KvGeometry:
        return cls(
            layers=config.layers,
            blocks=blocks,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=config.dtype,
            block_tokens=block_tokens,
        )

    @property
    def piece_bytes(self) -> int:
        """Of one block's keys, or values, in one layer."""
        return self.block_tokens * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return 2 * self.layers * self.piece_bytes

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def layout(self) -> str:
        """Equal when blocks can be copied between two caches as bytes, whatever number of
        blocks each has."""
        shape = (
            self.layers,
            self.block_tokens,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            "L2BNHD",
        )
        return hashlib.sha256(repr(shape).encode()).hexdigest()[:16]

    def segments(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """(offset, length) of the blocks' bytes in canonical order: by layer, keys before
        values, then in the order given. Neighbours are joined, so two caches may have
        different segments for the same bytes; the concatenation is the same."""
        for block in block_ids:
            if not 0 <= block < self.blocks:
                raise ValueError(f"block {block} is outside [0, {self.blocks})")
        runs = _runs(block_ids)
        piece = self.piece_bytes
        plane = self.blocks * piece
        return [
            (index * plane + first * piece, count * piece)
            for index in range(2 * self.layers)
            for first, count in runs
        ]


def _runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive ids as (first, count)."""
    runs: list[tuple[int, int]] = []
    for block in block_ids:
        if runs and block == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


class KvCache:
    """Torch views over `buffer`: at least `geometry.bytes` writable bytes that outlive it."""

    def __init__(self, geometry: KvGeometry, buffer: Buffer) -> None:
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise ValueError("the KV buffer is read-only")
        if len(view) < geometry.bytes:
            raise ValueError(f"the KV buffer has {len(view)} bytes; {geometry.bytes} are needed")
        self.geometry = geometry
        self.buffer = view
        shape = (
            geometry.layers,
            2,
            geometry.blocks,
            geometry.block_tokens,
            geometry.kv_heads,
            geometry.head_dim,
        )
        flat = torch.frombuffer(view[: geometry.bytes], dtype=TORCH_DTYPES[geometry.dtype])
        self.tensor = flat.view(shape)

    def planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [blocks, block_tokens, kv_heads, head_dim]."""
        return self.tensor[layer, 0], self.tensor[layer, 1]
