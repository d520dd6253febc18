"""Keys and values of all running requests, in blocks of tokens.

One shared buffer, [layers, 2, blocks, block_tokens, kv_heads, head_dim]: keys and values
apart, so that neighbouring blocks form one stretch of tokens that attention can read
where it lies. Each [blocks, block_tokens, kv_heads, head_dim] plane is what FlashInfer
calls NHD.
"""

from __future__ import annotations

import torch

from blitzd.engine.arena import TORCH_DTYPES, Buffer
from blitzd.engine.kv_geometry import KvGeometry


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
