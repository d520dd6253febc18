"""Model shapes: what of a transformer decides bytes and FLOPs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blitzd.sim.errors import InputError


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder. All counts are per model, none per device."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    ffn_matrices: int
    """3 for a gated MLP (gate, up, down), 2 for a plain one."""
    vocab: int
    max_context: int
    tied_embedding: bool = False
    dtype_bytes: int = 2

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices; norms and biases are below 0.1 %."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + self.ffn_matrices * self.hidden * self.ffn

    @property
    def parameters(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied_embedding else 2)
        return self.layers * self.layer_parameters + embeddings

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of every layer: 2 x layers x kv_heads x head_dim x bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def matmul_flops_per_token(self) -> int:
        """2 FLOPs a weight; the head runs once a sequence and is left out."""
        return 2 * self.layers * self.layer_parameters

    def attention_flops(self, new_tokens: int, past_tokens: int) -> int:
        """QK and PV of `new_tokens` causal queries after `past_tokens` keys, all layers."""
        pairs = new_tokens * past_tokens + new_tokens * (new_tokens + 1) // 2
        return 4 * self.layers * self.heads * self.head_dim * pairs


def _opt(name: str, layers: int, hidden: int) -> Model:
    heads = hidden // 128
    return Model(
        name, layers, hidden, heads, heads, 128, 4 * hidden, 2, 50272, 2048, tied_embedding=True
    )


def _gated(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, ctx: int
) -> Model:
    return Model(name, layers, hidden, heads, kv_heads, 128, ffn, 3, vocab, ctx)


MODELS = {
    model.name: model
    for model in (
        _opt("opt-13b", 40, 5120),
        _opt("opt-66b", 64, 9216),
        _opt("opt-175b", 96, 12288),
        _gated("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _gated("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _gated("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _gated("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _gated("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 131072),
        _gated("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 131072),
        _gated("mistral-7b", 32, 4096, 32, 8, 14336, 32768, 32768),
        _gated("mistral-24b", 40, 5120, 32, 8, 32768, 131072, 32768),
        _gated("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, 131072),
        _gated("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, 131072),
        _gated("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, 131072),
    )
}


def find_model(name: str) -> Model:
    """A built-in model by name, or the one of a Hugging Face `config.json` by path.

    Raises InputError naming what exists.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        known = ", ".join(MODELS)
        raise InputError(f"model: {name!r} is neither one of {known} nor a config.json")
    return _from_config(path)


def _from_config(path: Path) -> Model:
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a JSON model config: {error}") from error

    def size(*names: str, default: int | None = None) -> int:
        for key in names:
            value = config.get(key)
            if isinstance(value, int) and value > 0:
                return value
        if default is None:
            raise InputError(f"{path}: {' or '.join(names)}: a positive whole number is needed")
        return default

    if config.get("num_local_experts") or config.get("n_routed_experts"):
        raise InputError(f"{path}: num_local_experts: mixture-of-experts models are not modelled")
    hidden = size("hidden_size", "n_embd")
    heads = size("num_attention_heads", "n_head")
    plain = config.get("model_type") in ("opt", "gpt2", "gpt_neox", "falcon", "phi")
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return Model(
        name=str(config.get("_name_or_path") or path.parent.name or path.stem),
        layers=size("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        ffn=size("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
        ffn_matrices=2 if plain else 3,
        vocab=size("vocab_size"),
        max_context=size("max_position_embeddings", "n_positions", default=2048),
        tied_embedding=bool(config.get("tie_word_embeddings", plain)),
        dtype_bytes=4 if dtype.endswith("float32") else 2,
    )
