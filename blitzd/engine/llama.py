"""The forward pass of the Llama family, over an arena and a paged cache.

Work is bounded by layers as well as by tokens: `run_layers` takes hidden states in and
gives hidden states out, so a step can stop at any layer and another can take it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import rms_norm, silu

from blitzd.engine.arena import Arena
from blitzd.engine.attention import Attention
from blitzd.engine.model_config import ModelConfig
from blitzd.engine.projection import project


class _Layer(NamedTuple):
    attn_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Llama:
    """Stateless but for the attention's cache and plan.

    A row's result does not depend on the other rows of its batch, apart from the last bits
    of a sum that a matrix product may take in another order.
    """

    def __init__(self, config: ModelConfig, arena: Arena, attention: Attention) -> None:
        self.config = config
        self._attention = attention
        self._embed = arena.tensor("embed")
        self._layers = [_layer(arena, i, config.qkv_bias) for i in range(config.layers)]
        self._norm = arena.tensor("norm")
        self._head = self._embed if config.tied_head else arena.tensor("head")
        self._rotations = _rotations(config, 0).to(self._embed.device)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """[rows, hidden] of the model's dtype. Raises IndexError for an id that is not in
        the vocabulary."""
        return self._embed.index_select(0, torch.as_tensor(token_ids).to(self._embed.device))

    @torch.inference_mode()
    def run_layers(
        self,
        hidden: torch.Tensor,
        positions: Sequence[int] | torch.Tensor,
        first: int,
        last: int,
    ) -> torch.Tensor:
        """Layers [first, last) over [rows, hidden], for the batch that attention has
        planned; `positions` are the rows' places in their requests. `hidden` is kept."""
        if not 0 <= first <= last <= self.config.layers:
            raise ValueError(f"layers [{first}, {last}) of [0, {self.config.layers})")
        return self.run_rotated(hidden, self.rotation(positions), first, last)

    @torch.inference_mode()
    def run_rotated(
        self, hidden: torch.Tensor, rotation: torch.Tensor, first: int, last: int
    ) -> torch.Tensor:
        """`run_layers` without a look at the host's memory, so that a device can capture it."""
        for index in range(first, last):
            hidden = self._run_layer(index, hidden, rotation)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] in float32 (float64 for a float64 model) of rows that all layers
        have seen. On the host, so that a seed draws the same token on every device."""
        normed = rms_norm(hidden, (self.config.hidden,), self._norm, self.config.norm_eps)
        logits = project(normed, self._head).cpu()
        return logits if logits.dtype == torch.float64 else logits.float()

    def _run_layer(self, index: int, hidden: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        config, layer = self.config, self._layers[index]
        rows = hidden.shape[0]
        normed = rms_norm(hidden, (config.hidden,), layer.attn_norm, config.norm_eps)
        qkv = project(normed, layer.qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        qkv = qkv.view(rows, config.heads + 2 * config.kv_heads, config.head_dim)
        rotated = _rotate(qkv[:, : -config.kv_heads], rotation)
        q, k = rotated[:, : config.heads], rotated[:, config.heads :]
        attended = self._attention.run(index, q, k, qkv[:, -config.kv_heads :])
        hidden = hidden + project(attended.reshape(rows, -1), layer.o)
        normed = rms_norm(hidden, (config.hidden,), layer.mlp_norm, config.norm_eps)
        gate_up = project(normed, layer.gate_up)
        gate, up = gate_up[:, : config.ffn], gate_up[:, config.ffn :]
        return hidden + project(silu(gate) * up, layer.down)

    def rotation(self, positions: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """[rows, 1, head_dim / 2], complex, on the weights' device; `positions` are the host's."""
        positions = torch.as_tensor(positions)
        needed = int(positions.max()) + 1
        if needed > len(self._rotations):
            self._rotations = _rotations(self.config, needed).to(self._embed.device)
        return self._rotations.index_select(0, positions.to(self._embed.device)).unsqueeze(1)


def _layer(arena: Arena, index: int, qkv_bias: bool) -> _Layer:
    def tensor(name: str) -> torch.Tensor:
        return arena.tensor(f"layers.{index}.{name}")

    return _Layer(
        attn_norm=tensor("attn_norm"),
        qkv=tensor("qkv"),
        qkv_bias=tensor("qkv_bias") if qkv_bias else None,
        o=tensor("o"),
        mlp_norm=tensor("mlp_norm"),
        gate_up=tensor("gate_up"),
        down=tensor("down"),
    )


def _rotations(config: ModelConfig, needed: int) -> torch.Tensor:
    """e^(i position theta^(-2j/d)) for [positions, head_dim / 2], at least `needed` of them.

    Frequencies and angles are float32, as in the models' training code, so that far
    positions are rotated by the angle that the model knows.
    """
    positions = 1024
    while positions < needed:
        positions *= 2
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_factors:
        factors = torch.tensor(config.rope_factors, dtype=torch.float64)
        frequencies = (frequencies.double() / factors).float()
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    table = torch.complex(angles.cos(), angles.sin())
    return table.to(torch.complex128) if config.dtype == "float64" else table


def _rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (2j, 2j + 1) of [rows, heads, head_dim]: a complex product."""
    wide = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    pairs = torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(heads.dtype)
