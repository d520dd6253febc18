"""Keys and values of all running requests, in blocks of tokens.

One shared buffer, [layers, 2, blocks, block_tokens, kv_heads, head_dim]: keys and values
apart, so that neighbouring blocks form one stretch of tokens that attention can read
where it lies. Each [blocks, block_tokens, kv_heads, head_dim] plane is what FlashInfer
calls NHD.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blitzd.engine.arena import TORCH_DTYPES, Buffer
from blitzd.engine.kv_geometry import KvGeometry


class KvCache:
    """Torch views over `buffer`: at least `geometry.bytes` writable bytes that outlive it.

    With a `device`, keys and values lie there, and `buffer` is where blocks are staged on
    their way to and from other replicas; its untouched pages take no memory.
    """

    def __init__(
        self, geometry: KvGeometry, buffer: Buffer, device: torch.device | None = None
    ) -> None:
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
        self._staging = flat.view(shape)
        self.tensor = self._staging
        if device is not None:
            self.tensor = torch.zeros(shape, dtype=flat.dtype, device=device)

    def planes(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [blocks, block_tokens, kv_heads, head_dim]."""
        return self.tensor[layer, 0], self.tensor[layer, 1]

    @torch.inference_mode()
    def clear_after(self, blocks: Sequence[int], tokens: int) -> None:
        """Zeroes what follows `tokens` tokens in the last of their `blocks`. Attention masks
        it, but what a mask multiplies by zero must be finite: 0 x NaN is NaN. (FlashInfer's
        kernels, as of 0.7.4, read zeros there by themselves.)"""
        size = self.geometry.block_tokens
        if tokens % size:
            self.tensor[:, :, blocks[tokens // size], tokens % size :].zero_()

    @property
    def staged(self) -> bool:
        """Whether `buffer` holds copies, to be made by `stage_out` and taken by `stage_in`."""
        return self.tensor is not self._staging

    def stage_out(self, blocks: Sequence[int]) -> None:
        """Brings what the blocks hold into `buffer`, before their bytes are read there."""
        _copy_blocks(self.tensor, self._staging, blocks)

    def stage_in(self, blocks: Sequence[int]) -> None:
        """Takes up what was written into the blocks' bytes in `buffer`."""
        _copy_blocks(self._staging, self.tensor, blocks)


@torch.inference_mode()
def _copy_blocks(source: torch.Tensor, target: torch.Tensor, blocks: Sequence[int]) -> None:
    """Returns when the bytes are there."""
    if source is not target and blocks:
        index = torch.tensor(blocks)
        found = source.index_select(2, index.to(source.device)).to(target.device)
        target.index_copy_(2, index.to(target.device), found)
        if target.is_cuda:
            torch.cuda.current_stream(target.device).synchronize()
