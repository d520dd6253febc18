"""Hugging Face's model with the weights of an arena, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blitzd.engine.arena import Arena


def half_rotated(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes the interleaved order of q and k rows."""
    shape = rows.shape
    return rows.reshape(heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)


def _double_norm(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' norm rounds to float32 on the way, whatever the model's type."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * hidden * scale

    return forward


def use_double_norms(model: Any) -> Any:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _double_norm(module)
    return model


def reference_model(arena: Arena) -> LlamaForCausalLM:
    """transformers' model with the arena's weights."""
    config = arena.config
    hf = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=config.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_head,
    )
    model = LlamaForCausalLM(hf).to(arena.dtype).eval()
    q_rows, kv_rows = config.q_rows, config.kv_rows
    state = {"model.embed_tokens.weight": arena.tensor("embed")}
    for i in range(config.layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        q, k, v = arena.tensor(ours + "qkv").split([q_rows, kv_rows, kv_rows])
        gate, up = arena.tensor(ours + "gate_up").chunk(2)
        state |= {
            theirs + "self_attn.q_proj.weight": half_rotated(q, config.heads),
            theirs + "self_attn.k_proj.weight": half_rotated(k, config.kv_heads),
            theirs + "self_attn.v_proj.weight": v,
            theirs + "self_attn.o_proj.weight": arena.tensor(ours + "o"),
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": arena.tensor(ours + "down"),
            theirs + "input_layernorm.weight": arena.tensor(ours + "attn_norm"),
            theirs + "post_attention_layernorm.weight": arena.tensor(ours + "mlp_norm"),
        }
    state["model.norm.weight"] = arena.tensor("norm")
    state["lm_head.weight"] = arena.tensor("embed" if config.tied_head else "head")
    model.load_state_dict(state)
    return use_double_norms(model) if arena.dtype == torch.float64 else model
