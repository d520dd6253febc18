"""How a KV cache lies in its bytes. No torch here: the daemon sizes caches with it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

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

    def segments(
        self, block_ids: Sequence[int], layers: tuple[int, int] | None = None
    ) -> list[tuple[int, int]]:
        """(offset, length) of the blocks' bytes in layers [first, last) (None: all) in
        canonical order: by layer, keys before values, then in the order given. Neighbours are
        joined, so two caches may have different segments for the same bytes; the
        concatenation is the same."""
        first_layer, last_layer = layers or (0, self.layers)
        if not 0 <= first_layer < last_layer <= self.layers:
            raise ValueError(f"layers [{first_layer}, {last_layer}) of [0, {self.layers})")
        for block in block_ids:
            if not 0 <= block < self.blocks:
                raise ValueError(f"block {block} is outside [0, {self.blocks})")
        runs = _runs(block_ids)
        piece = self.piece_bytes
        plane = self.blocks * piece
        return [
            (index * plane + first * piece, count * piece)
            for index in range(2 * first_layer, 2 * last_layer)
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
