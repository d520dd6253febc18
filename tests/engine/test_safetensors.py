"""Hugging Face directories: tiny random models of every architecture, as transformers saves
them, give transformers' own logits in float64."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from blitzd.engine.batch import BatchLayout
from blitzd.engine.prepare import prepare
from blitzd.engine.safetensors_file import SafetensorsError, open_tensors
from tests.engines import Engine, Sequence
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
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama untied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama3 rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "linear rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral window": (MistralForCausalLM, MistralConfig, {"sliding_window": 21}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 1}),
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
    return use_double_norms(model.double())


def random_ids(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    ids: list[int] = torch.randint(0, 256, (count,), generator=generator).tolist()
    return ids


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    reference = save(tmp_path / "hf", name)
    ids = random_ids(120)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    engine = Engine(prepare(tmp_path / "hf", "float64", tmp_path / "c"))
    table = list(range(20, 0, -1))
    for chunk in (120, 17, 1):
        found = []
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            batch = BatchLayout([len(piece)], [start + len(piece)], [table])
            found.append(engine.model.logits(engine.step(batch, piece)))
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["mistral window", "qwen2"])
def test_greedy_batches_equal_transformers(tmp_path: Path, name: str) -> None:
    reference = save(tmp_path / "hf", name)
    engine = Engine(prepare(tmp_path / "hf", "float64", tmp_path / "c"))
    sequences = [
        Sequence(
            torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist(), 8
        )
        for n in (1, 5, 20, 21, 22, 40, 63, 64)
    ]
    engine.generate(sequences, chunk=9)
    for sequence in sequences:
        with torch.inference_mode():
            logits = reference(torch.tensor([sequence.ids])).logits[0]
        assert sequence.output == logits[len(sequence.prompt) - 1 : -1].argmax(-1).tolist()


def test_shards_are_one_model(tmp_path: Path) -> None:
    save(tmp_path / "one", "llama untied")
    save(tmp_path / "many", "llama untied", shard="40KB")
    assert (tmp_path / "many/model.safetensors.index.json").exists()
    one = Engine(prepare(tmp_path / "one", "float32", tmp_path / "c"))
    many = Engine(prepare(tmp_path / "many", "float32", tmp_path / "c"))
    assert one.arena.config.digest == many.arena.config.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architecture 'FalconForCausalLM'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"num_hidden_layers": 4}, r"'model\.layers\.3\.input_layernorm\.weight' is missing"),
        ({"num_hidden_layers": 2}, r"'model\.layers\.2\.\S+' is not supported"),
        ({"intermediate_size": 96}, r"layers\.0\.gate_up needs 192 rows"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save(tmp_path / "hf", "llama tied")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "hf", "float32", tmp_path / "c")


def file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


HOSTILE = {
    "empty": (b"", "too short"),
    "header past the end": (file({}, length=1 << 20), "a header of 1048576 bytes"),
    "header overflow": (file({}, length=(1 << 64) - 1), "a header of"),
    "no JSON": (file(b"{{{{"), "header is not"),
    "deep JSON": (file(b'{"x":' + b"[" * 100_000), "header is not"),
    "wrong fields": (file({"x": {"dtype": "F32"}}), "header is not"),
    "unknown type": (file(entry(dtype="F8_E4M3"), bytes(8)), "F8_E4M3"),
    "past the end": (file(entry(), bytes(4)), "claims the bytes"),
    "reversed": (file(entry(data_offsets=[8, 0]), bytes(8)), "claims the bytes"),
    "negative": (file(entry(data_offsets=[-8, 0]), bytes(8)), "claims the bytes"),
    "wrong size": (file(entry(shape=[1 << 62]), bytes(8)), "claims the bytes"),
    "zero": (file(entry(shape=[0], data_offsets=[0, 0])), "shape"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(SafetensorsError, match=message):
        open_tensors(tmp_path)


def test_an_index_stays_in_its_directory(tmp_path: Path) -> None:
    index = {"weight_map": {"x": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SafetensorsError, match="not a file beside it"):
        open_tensors(tmp_path)
