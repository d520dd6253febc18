"""What a model is, apart from its weights: shapes, constants and token ids.

Read from `model.json` of a prepared model directory. No torch here, so that the daemon
can know a model without paying for one.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Dtype = Literal["float64", "float32", "bfloat16", "float16"]

DTYPE_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of the Llama family. Rows of q and k are always stored for interleaved
    rotary embedding (the pair i is dimensions 2i and 2i+1), whatever the source had."""

    name: str
    architecture: str
    """As the source called it: "llama", "mistral", "qwen2"."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_tokens: int
    rope_theta: float
    norm_eps: float
    dtype: Dtype
    tied_head: bool
    """The head is the embedding, so the arena holds no tensor of its own for it."""
    qkv_bias: bool = False
    rope_factors: tuple[float, ...] = ()
    """Divides the rotary frequency of pair i by factor i (Llama 3's stretch, linear
    scaling); empty or head_dim / 2 long."""
    sliding_window: int = 0
    """A token sees itself and `sliding_window - 1` before it; 0 means all."""
    bos_token_id: int | None = None
    add_bos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    licence: str = ""
    digest: str = ""
    """Of shapes and weights (xxh3-128, hex); equal digests give equal tokens."""

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim


LIMITS = {
    "layers": 1024,
    "hidden": 1 << 17,
    "heads": 1024,
    "kv_heads": 1024,
    "head_dim": 1024,
    "ffn": 1 << 20,
    "vocab": 1 << 21,
    "context_tokens": 1 << 26,
}


def check_config(config: ModelConfig) -> None:
    """Raises ValueError naming the first field that makes no sense."""
    for field, limit in LIMITS.items():
        value = getattr(config, field)
        if not 1 <= value <= limit:
            raise ValueError(f"{field} is {value}; it must be between 1 and {limit}")
    if config.heads % config.kv_heads:
        raise ValueError(
            f"heads is {config.heads}, which is not a multiple of kv_heads {config.kv_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; rotary embedding needs it even")
    if not 0.0 < config.norm_eps < 1.0:
        raise ValueError(f"norm_eps is {config.norm_eps}; it must be between 0 and 1")
    check_theta(config.rope_theta)
    if config.rope_factors and len(config.rope_factors) != config.head_dim // 2:
        raise ValueError(
            f"rope_factors has {len(config.rope_factors)} values; head_dim needs "
            f"{config.head_dim // 2}"
        )
    if not all(1.0 <= factor < math.inf for factor in config.rope_factors):
        raise ValueError(f"rope_factors has {min(config.rope_factors)}; at least 1 is needed")
    if config.sliding_window < 0:
        raise ValueError(f"sliding_window is {config.sliding_window}; 0 means no window")
    ends = [("eos", token) for token in config.eos_token_ids]
    begins = [] if config.bos_token_id is None else [("bos", config.bos_token_id)]
    for kind, token in begins + ends:
        if not 0 <= token < config.vocab:
            raise ValueError(f"{kind} token {token} is outside the vocabulary of {config.vocab}")


def check_theta(theta: float) -> None:
    if not 1.0 <= theta < 1e12:
        raise ValueError(f"rope_theta is {theta}; it must be between 1 and 1e12")
