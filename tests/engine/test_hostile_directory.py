"""A model directory that somebody else made: refused in bounded time and memory, by name."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from blitzd.engine.prepare import prepare
from blitzd.engine.safetensors_file import SafetensorsError, open_tensors
from blitzd.engine.tokenizer import Tokenizer
from tests.hf_models import save

SMALL = ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("saved") / "hf"
    save(directory, "llama tied")
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def directory(saved: dict[str, bytes], tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    for name, data in saved.items():
        (tmp_path / "hf" / name).write_bytes(data)
    return tmp_path / "hf"


def refused(directory: Path, message: str, limit_s: float = 10.0) -> None:
    start = time.monotonic()
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        prepare(directory, "float32", directory.parent / "c")
    assert message in str(caught.value)
    assert time.monotonic() - start < limit_s


@pytest.mark.parametrize("name", [*SMALL, "model.safetensors"])
def test_a_pipe_or_a_device_is_not_read(directory: Path, name: str) -> None:
    (directory / name).unlink()
    os.mkfifo(directory / name)
    refused(directory, "is not a regular file")
    (directory / name).unlink()
    (directory / name).symlink_to("/dev/zero")
    refused(directory, "is not a regular file")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_file_of_any_size_is_not_read(directory: Path, name: str) -> None:
    os.truncate(directory / name, 1 << 40)  # sparse
    refused(directory, "bytes")


@pytest.mark.parametrize("part", ["q", "v"])
def test_tensors_in_each_others_place_are_named(directory: Path, part: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in (part, "k")]
    # As many rows in all.
    rows = np.concatenate([tensors[name] for name in names])
    tensors[names[0]], tensors[names[1]] = rows[: len(rows) - 6], rows[len(rows) - 6 :]
    save_file(tensors, directory / "model.safetensors")
    refused(directory, "_proj.weight' has the shape (")


@pytest.mark.parametrize("template", [[1], [{"name": "default"}], {"a": 1}, 7])
def test_what_is_no_template_is_none(directory: Path, template: object) -> None:
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    prepared = prepare(directory, "float32", directory.parent / "c")
    assert not (prepared / "chat_template.jinja").exists()


def test_a_template_that_is_no_text_is_refused(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    (directory / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}')
    refused(directory, "tokenizer_config.json: chat_template is not text")


def test_a_pipe_is_no_gguf(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    refused(tmp_path / "x.gguf", "is not a regular file")


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    index = {"weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("../a.safetensors", "which is not a .safetensors file beside it"),
        ("/etc/passwd", "which is not a .safetensors file beside it"),
        ("..", "which is not a .safetensors file beside it"),
        ("a.safetensors\0", "which is not a .safetensors file beside it"),
        ("", "which is not a .safetensors file beside it"),
        ("none.safetensors", "none.safetensors"),
    ],
)
def test_an_index_names_files_beside_it(directory: Path, shard: str, message: str) -> None:
    write_index(directory, {"model.norm.weight": shard})
    refused(directory, message)


def test_a_tensor_is_in_one_shard(directory: Path) -> None:
    write_index(directory, {"a": "a.safetensors", "b": "b.safetensors"})
    (directory / "b.safetensors").write_bytes((directory / "a.safetensors").read_bytes())
    with pytest.raises(SafetensorsError, match=r"tensor '\S+' is in two shards"):
        open_tensors(directory)


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def tokenizer(**changes: Any) -> bytes:
    """Of a vocabulary with two letters."""
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }  # fmt: skip
    return json.dumps(document | changes).encode()


def doubling(times: int) -> dict[str, Any]:
    one = replace({"String": "a"}, "aa")
    return {"type": "Sequence", "normalizers": [one] * times}


BOMBS = {
    "no tokenizer": (b"{}", "tokenizer.json: "),
    "deep": (b'{"model":' + b"[" * 100_000, "tokenizer.json: "),
    "memory": (tokenizer(normalizer=doubling(40)), "more than "),
    "one long replacement": (
        tokenizer(normalizer=replace({"Regex": "."}, "b" * (4 << 20))),
        "takes more than 3 GiB",
    ),
    "token past the embedding": (
        tokenizer(model={"type": "BPE", "vocab": {"a": 0, "far": 100_000}, "merges": []}),
        "token 'far' has the id 100000; the model has 259",
    ),
    "added token past the embedding": (
        tokenizer(
            added_tokens=[
                {"id": i, "content": f"[{i}]", "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False, "special": False}
                for i in range(2, 300)
            ]
        ),
        "the model has 259",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_harms_is_refused(directory: Path, name: str) -> None:
    data, message = BOMBS[name]
    (directory / "tokenizer.json").write_bytes(data)
    refused(directory, message, limit_s=60.0)


def test_a_tokenizer_that_does_not_end_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$|(a|a)*b"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    (directory / "tokenizer.json").write_bytes(tokenizer(pre_tokenizer=split))
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        prepare(directory, "float32", directory.parent / "c")
    assert time.monotonic() - start < 100.0


def test_texts_are_neither_cut_nor_filled(directory: Path) -> None:
    found = json.loads((directory / "tokenizer.json").read_bytes())
    found["truncation"] = {
        "max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"
    }  # fmt: skip
    found["padding"] = {
        "strategy": {"Fixed": 1 << 30}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(found))
    tokenizer = Tokenizer.from_dir(prepare(directory, "float32", directory.parent / "c"))
    assert len(tokenizer.encode("a longer text")) == 13
