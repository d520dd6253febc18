"""Hugging Face directories: tiny random models of every architecture, as transformers saves
them, give transformers' own logits in float64."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from blitzd.engine.batch import BatchLayout
from blitzd.engine.hf_config import rope_factors
from blitzd.engine.prepare import prepare
from blitzd.engine.safetensors_file import SafetensorsError, open_tensors
from tests.engines import Engine, Sequence
from tests.hf_models import LLAMA3, MODELS, save


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
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_frequencies_are_those_of_transformers_to_the_bit(
    head_dim: int, factor: float
) -> None:
    """With the numbers of Llama 3.1, 3.2 and 3.3: an angle grows with its position, and with
    it whatever is off."""
    theta = 500_000.0
    rope = LLAMA3 | {
        "factor": factor,
        "rope_theta": theta,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131_072)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    factors = torch.tensor(rope_factors(rope, theta, head_dim), dtype=torch.float64)
    assert torch.equal((plain.double() / factors).float(), expected)


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
        (
            {"intermediate_size": 96},
            r"gate_proj\.weight' has the shape \(80, 48\); \(96, 48\) was expected",
        ),
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
    with pytest.raises(SafetensorsError, match=r"not a \.safetensors file beside it"):
        open_tensors(tmp_path)
