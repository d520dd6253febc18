"""config.json: what it means is what transformers means by it; what we do not compute is
refused by name, before any list is made of its numbers."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, Qwen2Config

from blitzd.engine.hf_config import HfConfig

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 259,
    "max_position_embeddings": 512,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}


def read(directory: Path, changes: dict[str, Any]) -> HfConfig:
    values = {key: value for key, value in (BASE | changes).items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(values))
    return HfConfig(directory)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 0),
        ({"sliding_window": 16}, 0),  # Llama's class has no such option
        (MISTRAL, MistralConfig().sliding_window),
        (MISTRAL | {"sliding_window": None}, 0),
        (MISTRAL | {"sliding_window": 16}, 16),
        (QWEN2, 0),
        (QWEN2 | {"sliding_window": 16}, 0),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": False}, 0),
        (QWEN2 | {"sliding_window": None, "use_sliding_window": True}, 0),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True}, 0),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, 0),
        (QWEN2 | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        (QWEN2 | {"layer_types": ["full_attention"] * 3}, 0),
    ],
)
def test_windows_are_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], window: int
) -> None:
    found = read(tmp_path, changes).sliding_window
    assert found == window
    if changes.get("architectures") == ["Qwen2ForCausalLM"]:
        theirs = Qwen2Config(**(BASE | changes))
        kinds = set(theirs.layer_types or [])
        assert kinds == ({"sliding_attention"} if found else {"full_attention"})
        assert not found or theirs.sliding_window == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": []}, "architecture None; supported are LlamaForCausalLM, Mistral"),
        ({"architectures": "LlamaForCausalLM"}, "architecture None"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture ['LlamaForCausalLM']"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4} is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "are not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "are not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope factor is None; a number is needed"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope factor is 0.0; it must be between 1",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "rope factor is 1e+300; it must"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "a number is needed"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "make no sense",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 1e300,
                }
            },
            "make no sense",
        ),
        ({"rope_theta": -5.0}, "rope_theta is -5.0; it must be between 1 and"),
        ({"rope_theta": 10**400}, "a number is needed"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; true or false"),
        (QWEN2 | {"use_sliding_window": "no"}, "use_sliding_window is 'no'; true or false"),
        ({"rope_theta": "large"}, "rope_theta is 'large'; a number is needed"),
        ({"num_attention_heads": 7}, "hidden_size 48 is not a multiple of num_attention_heads 7"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be between 1 and"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; an integer is needed"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be between"),
        ({"head_dim": 1 << 40}, "head_dim is 1099511627776; it must be between"),
        (
            QWEN2 | {"use_sliding_window": True, "max_window_layers": 2},
            "layers of the kinds full_attention, sliding_attention; supported are",
        ),
        (QWEN2 | {"layer_types": ["linear_attention"] * 3}, "layers of the kinds linear_attention"),
        (MISTRAL | {"sliding_window": "wide"}, "sliding_window is 'wide'"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError) as refused:
        read(tmp_path, changes)
    assert message in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_head_may_have_a_size_of_its_own(tmp_path: Path) -> None:
    found = read(tmp_path, {"head_dim": 20, "num_key_value_heads": 2})
    assert (found.head_dim, found.kv_heads) == (20, 2)
    assert read(tmp_path, {}).head_dim == 8


def test_a_token_that_ends_is_a_number(tmp_path: Path) -> None:
    config = read(tmp_path, {"eos_token_id": 2})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert config.end_tokens() == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ValueError, match="eos_token_id has '</s>'"):
        config.end_tokens()
