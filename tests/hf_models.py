"""Tiny random models of every supported architecture, as transformers makes and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.reference import use_double_norms
from tests.tiny import RandomSource, tiny_config

SHAPE: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "bos_token_id": 258, "eos_token_id": 256,
    "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def _heads(heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


_ALL_SLIDE = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 0}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_LLAMA = (LlamaForCausalLM, LlamaConfig)
_MISTRAL = (MistralForCausalLM, MistralConfig)
_QWEN2 = (Qwen2ForCausalLM, Qwen2Config)
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # Heads that share a KV head: 3, 1, 4, 2, 2, 8, 2, 2, 8. Heads x size is not the hidden size
    # in half of them.
    "llama tied": (*_LLAMA, TIED),
    "llama untied": (*_LLAMA, UNTIED | _heads(4, 4, 12)),
    "llama3 rope": (*_LLAMA, UNTIED | {"rope_parameters": LLAMA3} | _heads(8, 2, 16)),
    "linear rope": (*_LLAMA, TIED | {"rope_parameters": LINEAR} | _heads(2, 1, 24)),
    "mistral": (*_MISTRAL, TIED | {"sliding_window": None} | _heads(4, 2, 16)),
    "mistral window": (*_MISTRAL, UNTIED | {"sliding_window": 21} | _heads(8, 1, 8)),
    "qwen2": (*_QWEN2, UNTIED | _heads(6, 3, 8)),
    "qwen2 window": (*_QWEN2, UNTIED | _ALL_SLIDE | _heads(4, 2, 8)),
    "qwen2 tied": (*_QWEN2, TIED | {"num_hidden_layers": 2} | _heads(8, 1, 4)),
}


def save(directory: Path, name: str, shard: str = "5GB") -> torch.nn.Module:
    """Saves a random model and its tokenizer; returns the model in float64."""
    model_class, config_class, changes = MODELS[name]
    torch.manual_seed(3)
    model = model_class(config_class(**(SHAPE | changes))).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(directory, max_shard_size=shard)
    RandomSource(tiny_config()).write_tokenizer(directory)
    found: torch.nn.Module = use_double_norms(model.double())
    return found
