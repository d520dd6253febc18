"""What a request may ask of its distribution: bias, penalties, and cuts of the tail.

Each function takes one row, [vocab], and gives a new one; a token that is out gets minus
infinity. Definitions follow Hugging Face's logits processors, and OpenAI's for presence
and frequency penalties.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

_OUT = float("-inf")
_HEAD = 1024
"""Tokens that top-p looks at before it sorts them all."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults change nothing. Raises ValueError naming the field that is out of range."""

    temperature: float = 0.0
    """0 is greedy, and so is what is too small to divide by."""
    seed: int = 0
    """64 bits."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this mass."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely one's mass."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the entropy, up to this mass."""
    repetition_penalty: float = 1.0
    """Divides positive logits, multiplies negative ones, of tokens in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that a token is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit)."""

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0.0, sys.float_info.max),
            "top_k": (0, 1 << 31),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "typical_p": (0.0, 1.0),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "seed": (0, (1 << 64) - 1),
        }
        for field, (low, high) in ranges.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise ValueError(f"{field}: {value}; must be between {low} and {high}")
        for token, bias in self.logit_bias:
            if token < 0 or not math.isfinite(bias):
                raise ValueError(f"logit_bias of token {token}: {bias}; must be a finite number")

    @property
    def draws(self) -> bool:
        return self.temperature >= 1e-5

    @property
    def penalises(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def adjusts(self) -> bool:
        """Whether even the greedy choice can change."""
        return bool(self.logit_bias) or self.penalises

    @property
    def restricts(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0


@dataclass(frozen=True, slots=True)
class RowContext:
    """What of a request its distribution depends on, besides the logits."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed: torch.Tensor | None = None
    """Boolean [vocab]: what a grammar, or an end that may not come yet, leaves open."""


def adjust(row: torch.Tensor, params: SamplingParams, context: RowContext | None) -> torch.Tensor:
    """Mask, bias and penalties. Raises ValueError for penalties without a context, for a
    token outside the vocabulary and for a mask that leaves nothing."""
    row = row.clone()
    for token, bias in params.logit_bias:
        if token >= len(row):
            raise ValueError(f"logit_bias names token {token}; the vocabulary has {len(row)}")
        row[token] += bias
    if params.penalises:
        if context is None:
            raise ValueError("penalties need the tokens of the request")
        _penalise(row, params, context)
    if context is not None and context.allowed is not None:
        if not bool(context.allowed.any()):
            raise ValueError("no token is allowed")
        row.masked_fill_(~context.allowed, _OUT)
    return row


def _penalise(row: torch.Tensor, params: SamplingParams, context: RowContext) -> None:
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*context.prompt, *context.output}), dtype=torch.long)
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if context.output and (params.presence_penalty or params.frequency_penalty):
        tokens, counts = torch.unique(torch.tensor(context.output), return_counts=True)
        row[tokens] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)


def restrict(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Top-k, top-p, min-p and typical-p, one after the other; at least one token stays."""
    if 0 < params.top_k < len(row):
        row = row.masked_fill(row < row.topk(params.top_k).values[-1], _OUT)
    if params.top_p < 1.0:
        row = _top_p(row, params.top_p)
    if params.min_p > 0.0:
        mass = row.softmax(-1)
        row = row.masked_fill(mass < params.min_p * mass.max(), _OUT)
    if params.typical_p < 1.0:
        row = _typical_p(row, params.typical_p)
    return row


def _top_p(row: torch.Tensor, top_p: float) -> torch.Tensor:
    """The nucleus is mostly small, and its head is found many times as fast as by a sort of
    the vocabulary."""
    mass = row.softmax(-1)
    values, order = mass.topk(min(_HEAD, len(row)))
    if float(values.sum()) < top_p:
        values, order = mass.sort(descending=True)
    above = values.cumsum(-1) - values
    kept = order[above < top_p] if top_p > 0 else order[:1]
    return torch.full_like(row, _OUT).index_copy_(0, kept, row[kept])


def _typical_p(row: torch.Tensor, typical_p: float) -> torch.Tensor:
    """Meister et al., "Locally typical sampling"."""
    log_mass = row.log_softmax(-1)
    mass = log_mass.exp()
    entropy = -(log_mass * mass).nansum()
    distance = (-log_mass - entropy).abs()
    order = distance.argsort(stable=True)
    kept = int((mass[order].cumsum(-1) < typical_p).sum()) + 1
    limit = distance[order[min(kept, len(row)) - 1]]
    return row.masked_fill(distance > limit, _OUT)
