"""Paged attention in plain torch: the back end for CPUs, and the reference for others.

A back end plans once per step from the batch's page tables and then runs once per layer;
everything that depends on the batch's shape alone is done in `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from blitzd.engine.batch import BatchLayout
from blitzd.engine.kv_cache import KvCache


class Attention(Protocol):
    """What `Llama` needs of a back end."""

    def plan(self, batch: BatchLayout) -> None: ...

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor: ...


_PIECE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Span:
    """Where the keys of one request, or of several of about one length, are read."""

    first: int
    """First block of a run of neighbours, read in place; -1 when gathered."""
    pieces: torch.Tensor | None
    """[requests * pieces each] numbers of stretches of `piece` tokens to gather."""
    piece: int
    """A part of a block, so that a block's empty end is not moved."""
    tokens: int
    """Length that the keys are cut to."""


@dataclass(frozen=True, slots=True)
class _Decode:
    rows: torch.Tensor | None
    """Rows of the batch; None when they are all of it, in order."""
    span: _Span
    requests: int
    mask: torch.Tensor | None
    """Additive [requests, 1, 1, tokens], where lengths differ."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    start: int
    stop: int
    span: _Span
    causal: bool
    mask: torch.Tensor | None
    """Boolean [rows, tokens], where the rows continue a context that is there."""


@dataclass(frozen=True, slots=True)
class _Plan:
    slots: torch.Tensor
    """Of each row's key and value, in tokens from the plane's start."""
    decodes: list[_Decode]
    prefills: list[_Prefill]
    rows: int


class TorchAttention:
    """Attention over `cache`. One plan at a time: whoever changes the batch plans again."""

    def __init__(self, cache: KvCache, heads: int, sliding_window: int = 0) -> None:
        geometry = cache.geometry
        if heads % geometry.kv_heads:
            raise ValueError(f"{heads} heads cannot share {geometry.kv_heads} KV heads evenly")
        self.cache = cache
        self.heads = heads
        self._window = sliding_window
        self._group = heads // geometry.kv_heads
        self._dtype = cache.tensor.dtype
        self._plan: _Plan | None = None

    def plan(self, batch: BatchLayout) -> None:
        """Raises ValueError for a batch that does not fit the cache."""
        geometry = self.cache.geometry
        batch.check(geometry.blocks, geometry.block_tokens)
        decode: list[tuple[int, int, Sequence[int]]] = []
        prefills: list[_Prefill] = []
        row = 0
        for query, context, table in zip(
            batch.query_lens, batch.context_lens, batch.block_tables, strict=True
        ):
            if query == 1:
                decode.append((context, row, table))
            else:
                prefills.append(self._plan_prefill(row, query, context, table))
            if query >= context % geometry.block_tokens:
                # The step fills the last block from its start.
                self.cache.clear_after(table, context)
            row += query
        slots = torch.tensor(batch.slots(geometry.block_tokens))
        self._plan = _Plan(slots, self._plan_decodes(decode, row), prefills, row)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Writes k and v ([rows, kv_heads, head_dim], rotated) into the cache, then attends.

        q is [rows, heads, head_dim]; so is the result. Raises RuntimeError without a plan.
        """
        plan = self._plan
        if plan is None or q.shape[0] != plan.rows:
            raise RuntimeError(f"{q.shape[0]} rows; planned were {plan.rows if plan else 'none'}")
        keys, values = self.cache.planes(layer)
        keys.flatten(0, 1).index_copy_(0, plan.slots, k)
        values.flatten(0, 1).index_copy_(0, plan.slots, v)
        if not plan.prefills and len(plan.decodes) == 1:
            return self._decode(plan.decodes[0], keys, values, q)
        out = torch.empty_like(q)
        for decode in plan.decodes:
            assert decode.rows is not None
            part = self._decode(decode, keys, values, q.index_select(0, decode.rows))
            out.index_copy_(0, decode.rows, part)
        for prefill in plan.prefills:
            self._prefill(prefill, keys, values, q, out)
        return out

    def _decode(
        self, decode: _Decode, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor
    ) -> torch.Tensor:
        """The heads that share a KV head stand where a prefill has its query positions, so
        grouped heads read their keys once."""
        count = decode.requests
        shape = (count, self.cache.geometry.kv_heads, self._group, q.shape[-1])
        out = scaled_dot_product_attention(
            q.reshape(shape),
            _read(keys, decode.span, count).transpose(1, 2),
            _read(values, decode.span, count).transpose(1, 2),
            attn_mask=decode.mask,
        )
        return out.reshape(count, self.heads, q.shape[-1])

    def _prefill(
        self,
        prefill: _Prefill,
        keys: torch.Tensor,
        values: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """KV heads stand where a batch has its requests, and the heads that share one read
        it through a stride of zero."""
        kv_heads, group = self.cache.geometry.kv_heads, self._group
        rows = prefill.stop - prefill.start
        shape = (rows, kv_heads, group, q.shape[-1])
        k, v = (
            _read(plane, prefill.span, 1).permute(2, 0, 1, 3).expand(-1, group, -1, -1)
            for plane in (keys, values)
        )
        result = scaled_dot_product_attention(
            q[prefill.start : prefill.stop].view(shape).permute(1, 2, 0, 3),
            k,
            v,
            attn_mask=prefill.mask,
            is_causal=prefill.causal,
        )
        out[prefill.start : prefill.stop].view(shape).copy_(result.permute(2, 0, 1, 3))

    def _plan_prefill(self, row: int, query: int, context: int, table: Sequence[int]) -> _Prefill:
        span = self._span([table], context)
        window = self._window if 0 < self._window < context else 0
        if query == context and not window:
            return _Prefill(row, row + query, span, True, None)
        position = torch.arange(context - query, context).unsqueeze(1)
        key = torch.arange(context).unsqueeze(0)
        mask = key <= position
        if window:
            mask &= key > position - window
        return _Prefill(row, row + query, span, False, mask)

    def _plan_decodes(
        self, decode: list[tuple[int, int, Sequence[int]]], rows: int
    ) -> list[_Decode]:
        plans: list[_Decode] = []
        for bucket in _buckets(decode, self.cache.geometry.block_tokens):
            tokens = bucket[0][0]
            span = self._span([table for _, _, table in bucket], tokens)
            lengths = torch.tensor([context for context, _, _ in bucket]).view(-1, 1, 1, 1)
            key = torch.arange(tokens)
            hidden = key >= lengths
            if self._window:
                hidden = hidden | (key < lengths - self._window)
            mask = None
            if bool(hidden.any()):
                mask = torch.zeros(hidden.shape, dtype=self._dtype)
                mask.masked_fill_(hidden, float("-inf"))
            order = [row for _, row, _ in bucket]
            plans.append(_Decode(torch.tensor(order), span, len(bucket), mask))
        if len(plans) == 1 and plans[0].requests == rows:
            # One bucket is the whole batch: put it in the batch's own order.
            return [self._unsorted(decode, plans[0])]
        return plans

    def _unsorted(self, decode: list[tuple[int, int, Sequence[int]]], plan: _Decode) -> _Decode:
        assert plan.rows is not None
        span = self._span([table for _, _, table in decode], plan.span.tokens)
        mask = plan.mask
        if mask is not None:
            mask = mask.index_select(0, plan.rows.argsort())
        return _Decode(None, span, plan.requests, mask)

    def _span(self, tables: list[Sequence[int]], tokens: int) -> _Span:
        size = self.cache.geometry.block_tokens
        count = -(-tokens // size)
        if len(tables) == 1:
            first = tables[0][0]
            if all(tables[0][i] == first + i for i in range(count)):
                return _Span(first, None, size, tokens)
        piece = gcd(size, _PIECE_TOKENS)
        # A short table is filled up with its first block: masked, and sure to exist.
        blocks = torch.tensor(
            [table[i] if i < len(table) else table[0] for table in tables for i in range(count)]
        )
        pieces = blocks.view(len(tables), count, 1) * (size // piece) + torch.arange(size // piece)
        needed = pieces.flatten(1)[:, : -(-tokens // piece)]
        return _Span(-1, needed.flatten(), piece, tokens)


def _read(plane: torch.Tensor, span: _Span, requests: int) -> torch.Tensor:
    """[requests, tokens, kv_heads, head_dim] out of [blocks, block_tokens, ...]."""
    if span.pieces is None:
        count = -(-span.tokens // plane.shape[1])
        found = plane[span.first : span.first + count]
    else:
        found = plane.view(-1, span.piece * plane[0, 0].numel()).index_select(0, span.pieces)
    return found.view(requests, -1, *plane.shape[2:])[:, : span.tokens]


def _buckets(
    decode: list[tuple[int, int, Sequence[int]]], block_tokens: int
) -> list[list[tuple[int, int, Sequence[int]]]]:
    """Decodes of about one length together, longest first in each: padding then costs at
    most a quarter, or two blocks where everything is short."""
    buckets: list[list[tuple[int, int, Sequence[int]]]] = []
    for item in sorted(decode, key=lambda item: -item[0]):
        if buckets:
            longest = buckets[-1][0][0]
            if item[0] >= 0.75 * longest or longest - item[0] <= 2 * block_tokens:
                buckets[-1].append(item)
                continue
        buckets.append([item])
    return buckets
