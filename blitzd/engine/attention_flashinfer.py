"""Paged attention on a CUDA device, by FlashInfer (Ye et al., MLSys 2025).

The device's counterpart of `TorchAttention`, over the same pages. A step's batch is cut in
two: the one-token requests at its front go to the decode kernel, the rest to a prefill
kernel, the ragged one when all of it are whole prompts, whose keys need not be looked up in
pages. Decode batches up to `graph_rows` are planned into buffers that stay where they are,
one set a batch size, so that a captured CUDA graph can be replayed (`decode_graphs`).

FlashInfer is imported when a back end is made, never before: it is an extra, and it needs a
device.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from blitzd.engine.batch import BatchLayout
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.page_tables import PageTables

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends; holds partial results of contexts that are split over SMs."""

CUDA_CORE_GROUP = 3
"""Up to so many query heads a KV head the decode kernel without tensor cores is used; it is
made for groups of 1, 2, 3, 4, 6, 8 and 16 only, and larger groups can fill a tensor core."""


@dataclass(frozen=True, slots=True)
class _Decode:
    wrapper: Any
    slots: torch.Tensor
    """Where each row's key and value go; its address is part of a captured graph."""


@dataclass(frozen=True, slots=True)
class _Plan:
    rows: int
    slots: torch.Tensor
    decode: Any | None
    decode_rows: int
    prefill: Any | None
    ragged: bool
    captured: bool


class FlashInferAttention:
    """Attention over `cache`, a device's. One plan at a time, as with `TorchAttention`.

    Buffers of a plan are written over by the next: a step's results have been read back (its
    tokens were) before another step is planned.
    """

    def __init__(
        self,
        cache: KvCache,
        heads: int,
        sliding_window: int = 0,
        *,
        graph_rows: int = 0,
        context_tokens: int = 0,
        library: Any = None,
    ) -> None:
        """`graph_rows` and `context_tokens` bound the decode batches that are planned for
        graphs. `library` stands for the module `flashinfer`, which is the default."""
        geometry = cache.geometry
        if heads % geometry.kv_heads:
            raise ValueError(f"{heads} heads cannot share {geometry.kv_heads} KV heads evenly")
        self.cache = cache
        self.heads = heads
        self._window_left = sliding_window - 1 if sliding_window else -1
        self._graph_rows = graph_rows
        self._library = library or importlib.import_module("flashinfer")
        self._device = cache.tensor.device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        pages = graph_rows * -(-context_tokens // geometry.block_tokens)
        self._graph_indices = torch.zeros(pages, dtype=torch.int32, device=self._device)
        self._graph_decodes: dict[int, _Decode] = {}
        self._decode = self._decode_wrapper()
        self._paged = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, "NHD", backend="fa2"
        )
        self._ragged = self._library.BatchPrefillWithRaggedKVCacheWrapper(
            self._workspace, "NHD", backend="fa2"
        )
        self._plan: _Plan | None = None

    @property
    def captured_rows(self) -> int:
        """Rows of a planned batch whose layers may be replayed from a graph; 0 when it has no
        fixed buffers."""
        plan = self._plan
        return plan.rows if plan is not None and plan.captured else 0

    def plan(self, batch: BatchLayout) -> None:
        """Raises ValueError for a batch that does not fit the cache."""
        geometry = self.cache.geometry
        self._plan = None
        batch.check(geometry.blocks, geometry.block_tokens)
        requests = len(batch.query_lens)
        ones = next((i for i, query in enumerate(batch.query_lens) if query > 1), requests)
        slots = torch.tensor(batch.slots(geometry.block_tokens))
        if ones == requests and self._fits_graph(batch):
            self._plan = self._plan_captured(batch, slots)
            return
        if ones:
            self._plan_decode(self._decode, batch.part(0, ones))
        prefill, ragged = None, False
        if ones < requests:
            prefill, ragged = self._plan_prefill(batch.part(ones, requests))
        decode = self._decode if ones else None
        slots = slots.to(self._device)
        self._plan = _Plan(batch.rows, slots, decode, ones, prefill, ragged, False)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes k and v ([rows, kv_heads, head_dim], rotated) into the cache, then attends.

        q is [rows, heads, head_dim]; so is the result. Raises RuntimeError without a plan.
        """
        plan = self._plan
        if plan is None or q.shape[0] != plan.rows:
            raise RuntimeError(f"{q.shape[0]} rows; planned were {plan.rows if plan else 'none'}")
        planes = self.cache.planes(layer)
        for plane, new in zip(planes, (k, v), strict=True):
            plane.flatten(0, 1).index_copy_(0, plan.slots, new)
        q = q.contiguous()
        out = torch.empty_like(q)
        split = plan.decode_rows
        if plan.decode is not None:
            plan.decode.run(q[:split], planes, out=out[:split])
        if plan.prefill is not None and plan.ragged:
            plan.prefill.run(
                q[split:], k[split:].contiguous(), v[split:].contiguous(), out=out[split:]
            )
        elif plan.prefill is not None:
            plan.prefill.run(q[split:], planes, out=out[split:])
        return out

    def _fits_graph(self, batch: BatchLayout) -> bool:
        pages = sum(-(-n // self.cache.geometry.block_tokens) for n in batch.context_lens)
        return batch.rows <= self._graph_rows and pages <= len(self._graph_indices)

    def _plan_captured(self, batch: BatchLayout, slots: torch.Tensor) -> _Plan:
        rows = batch.rows
        decode = self._graph_decodes.get(rows)
        if decode is None:
            decode = _Decode(self._decode_wrapper(rows), torch.zeros_like(slots).to(self._device))
            self._graph_decodes[rows] = decode
        decode.slots.copy_(slots)
        self._plan_decode(decode.wrapper, batch)
        return _Plan(rows, decode.slots, decode.wrapper, rows, None, False, True)

    def _plan_decode(self, wrapper: Any, batch: BatchLayout) -> None:
        geometry = self.cache.geometry
        tables = PageTables.of(batch, geometry.block_tokens)
        wrapper.plan(
            _int32(tables.kv_indptr),
            _int32(tables.kv_indices),
            _int32(tables.last_page_len),
            self.heads,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.block_tokens,
            **self._numbers(),
        )

    def _plan_prefill(self, batch: BatchLayout) -> tuple[Any, bool]:
        """(wrapper, whether it is the ragged one), planned."""
        geometry = self.cache.geometry
        tables = PageTables.of(batch, geometry.block_tokens)
        rows = _int32(tables.qo_indptr)
        shape = (self.heads, geometry.kv_heads, geometry.head_dim)
        if list(batch.query_lens) == list(batch.context_lens):
            self._ragged.plan(rows, rows, *shape, causal=True, **self._numbers())
            return self._ragged, True
        self._paged.plan(
            rows,
            _int32(tables.kv_indptr),
            _int32(tables.kv_indices),
            _int32(tables.last_page_len),
            *shape,
            geometry.block_tokens,
            causal=True,
            **self._numbers(),
        )
        return self._paged, False

    def _numbers(self) -> dict[str, Any]:
        dtype = self.cache.tensor.dtype
        return {"window_left": self._window_left, "q_data_type": dtype, "kv_data_type": dtype}

    def _decode_wrapper(self, rows: int = 0) -> Any:
        """For any batch, or for graphs of `rows` requests."""
        fixed: dict[str, Any] = {}
        if rows:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._buffer(rows + 1),
                "paged_kv_indices_buffer": self._graph_indices,
                "paged_kv_last_page_len_buffer": self._buffer(rows),
            }
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_tensor_cores=self.heads // self.cache.geometry.kv_heads > CUDA_CORE_GROUP,
            backend="fa2",
            **fixed,
        )

    def _buffer(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.int32, device=self._device)


def _int32(values: list[int]) -> torch.Tensor:
    """On the host: FlashInfer's planner reads it there and copies what the kernel needs."""
    return torch.tensor(values, dtype=torch.int32)
