"""GGUF files: bit for bit as the `gguf` package reads them; hostile ones refused quickly."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind, GGUFReader
from gguf.quants import dequantize
from hypothesis import given, settings, strategies as st

from blitzd.engine.catalogue import CATALOGUE, DEFAULT_MODEL, is_pulled, model_path
from blitzd.engine.gguf import GgufError, GgufFile
from blitzd.engine.gguf_tokenizer import tokenizer_json
from blitzd.engine.source_gguf import GgufSource
from tests.gguf_files import quantised, random_blocks, tiny_gguf, tiny_weights, write_gguf

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantises_bit_for_bit(tmp_path: Path, kind: Kind) -> None:
    raw = random_blocks(kind, rows=33, columns=512)
    path = write_gguf(tmp_path / "x.gguf", {"blk.0.ffn_up.weight": (raw, kind)})
    file = GgufFile(path)
    found = file.read_rows("blk.0.ffn_up.weight", 0, 33)
    expected = dequantize(raw, kind)
    assert file.tensors["blk.0.ffn_up.weight"].shape == (33, 512)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    part = file.read_rows("blk.0.ffn_up.weight", 5, 9)
    np.testing.assert_array_equal(part.view(np.uint32), expected[5:9].view(np.uint32))


@pytest.mark.skipif(not is_pulled(CATALOGUE[DEFAULT_MODEL]), reason="blitzd model pull was not run")
def test_the_embedded_model_equals_the_gguf_package() -> None:
    path = model_path(CATALOGUE[DEFAULT_MODEL])
    ours, theirs = GgufFile(path), GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "llama.rope.freq_base"):
        assert ours.metadata[key] == theirs.fields[key].contents()
    for tensor in theirs.tensors:
        rows = 64 if tensor.name == "token_embd.weight" else len(tensor.data)
        expected = dequantize(tensor.data[:rows], tensor.tensor_type)
        found = ours.read_rows(tensor.name, 0, rows if expected.ndim > 1 else 1)
        np.testing.assert_array_equal(
            found.reshape(-1).view(np.uint32), expected.reshape(-1).view(np.uint32)
        )


def header(tensors: int = 0, entries: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + body


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def tensor(dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return text(b"blk.0.x") + packed


HUGE = (1 << 64) - 1
ARRAY = struct.pack("<I", 9)

HOSTILE = {
    "empty": (b"", "too short"),
    "other magic": (b"\x7fELF" + bytes(40), "first four bytes"),
    "version 1": (header(version=1), "version 1"),
    "big endian": (header(version=3 << 24), "big-endian"),
    "tensor count": (header(tensors=HUGE), f"number of tensors is {HUGE}"),
    "entry count": (header(entries=20_000_000), "number of metadata entries is 20000000"),
    "claimed entries": (header(entries=60_000), "needs 8 bytes"),
    "key length": (header(entries=1, body=text(b"", HUGE)), "length of metadata key 0"),
    "string past the end": (
        header(entries=1, body=text(b"a") + struct.pack("<I", 8) + text(b"", 1 << 20)),
        "needs 1048576 bytes",
    ),
    "array length": (
        header(entries=1, body=text(b"a") + ARRAY + struct.pack("<IQ", 8, HUGE)),
        "length of metadata 'a'",
    ),
    "array past the end": (
        header(entries=1, body=text(b"a") + ARRAY + struct.pack("<IQ", 8, 1 << 21)),
        "too short",
    ),
    "numbers past the end": (
        header(entries=1, body=text(b"a") + ARRAY + struct.pack("<IQ", 10, 1 << 21)),
        "needs 16777216 bytes",
    ),
    "too much in all": (
        header(
            entries=3,
            body=b"".join(
                text(key) + ARRAY + struct.pack("<IQ", 0, 1 << 21) + bytes(1 << 21)
                for key in (b"a", b"b", b"c")
            ),
        ),
        "more than 4194304 strings and array elements",
    ),
    "nested array": (
        header(entries=1, body=text(b"a") + ARRAY + struct.pack("<IQ", 9, 1) + bytes(64)),
        "unsupported type 9",
    ),
    "value type": (header(entries=1, body=text(b"a") + struct.pack("<I", 77)), "type 77"),
    "same key twice": (
        header(entries=2, body=(text(b"a") + struct.pack("<IB", 0, 1)) * 2),
        "'a' appears twice",
    ),
    "key not UTF-8": (header(entries=1, body=text(b"\xff\xff") + bytes(8)), "not UTF-8"),
    "alignment": (
        header(entries=1, body=text(b"general.alignment") + struct.pack("<II", 4, 0)),
        "general.alignment is 0",
    ),
    "dimensions": (header(tensors=1, body=tensor([1] * 9)), "9 dimensions"),
    "shape overflow": (header(tensors=1, body=tensor([1 << 62] * 4)), "ends outside"),
    "zero shape": (header(tensors=1, body=tensor([0])), "not made of whole"),
    "ragged blocks": (header(tensors=1, body=tensor([33], kind=8)), "Q8_0 blocks of 32"),
    "unsupported type": (header(tensors=1, body=tensor([256], kind=10)), "Q2_K"),
    "unknown type": (header(tensors=1, body=tensor([256], kind=4_000_000)), "4000000"),
    "offset past the end": (header(tensors=1, body=tensor([8], offset=1 << 40)), "ends outside"),
    "offset overflow": (
        header(tensors=1, body=tensor([8], offset=HUGE - 31)),
        "ends outside",
    ),
    "misaligned": (header(tensors=1, body=tensor([8], offset=4)), "not a multiple of 32"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_quickly(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    start = time.perf_counter()
    with pytest.raises(GgufError, match=message) as refused:
        GgufFile(path)
    assert time.perf_counter() - start < 1.0
    assert str(path) in str(refused.value)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "valid.gguf").read_bytes()[:30_000]


@settings(max_examples=300, deadline=1000)
@given(changes=st.lists(st.tuples(st.integers(0, 8000), st.integers(0, 255)), max_size=8))
def test_damaged_headers_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, valid: bytes, changes: list[tuple[int, int]]
) -> None:
    damaged = bytearray(valid)
    for at, value in changes:
        damaged[at] = value
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    with pytest.raises(GgufError):  # cut short, so refused at the latest for that
        GgufSource(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "falcon"}, "architecture 'falcon'"),
        ({"drop": "blk.1.ffn_up.weight"}, "'blk.1.ffn_up.weight' is missing"),
        ({"drop": "token_embd.weight"}, "'token_embd.weight' is missing"),
        ({"numbers": {"rope.dimension_count": 32}}, "32 of 64 dimensions"),
        ({"numbers": {"attention.head_count": 5}}, "5 attention heads"),
        (
            {"numbers": {"attention.head_count_kv": 4}},
            r"'blk.0.attn_k.weight' has the shape \(128, 256",
        ),
        ({"numbers": {"feed_forward_length": 1024}}, r"ffn_gate.weight' has the shape \(512, 256"),
        ({"texts": {"llama.rope.scaling.type": "yarn"}}, "'yarn' is not supported"),
        ({"texts": {"llama.rope.scaling.type": "linear"}}, "'linear' is not supported"),
        ({"numbers": {"rope.scale_linear": 4.0}}, r"rope.scale_linear 4\.0 is not supported"),
        ({"numbers": {"rope.scaling.factor": 4.0}}, r"rope.scaling.factor 4\.0 is not supported"),
        ({"numbers": {"attention.value_length": 32}}, "attention.value_length 32 beside keys"),
        ({"numbers": {"block_count": 4_000_000_000}}, "layers is 4000000000"),
        (
            {"numbers": {"attention.key_length": 128}},
            r"attn_q.weight' has the shape \(256, 256\); \(512",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tiny_gguf(tmp_path / "x.gguf", **changes)  # type: ignore[arg-type]
    with pytest.raises(GgufError, match=message):
        GgufSource(path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("pair", [("attn_q", "attn_k"), ("attn_k", "ffn_up")])
def test_tensors_in_each_others_place_are_named(
    tmp_path: Path, architecture: str, pair: tuple[str, str]
) -> None:
    names = [f"blk.1.{part}.weight" for part in pair]
    found = tiny_weights()
    swapped = {
        name: quantised(found[other], Kind.F32)
        for name, other in zip(names, reversed(names), strict=True)
    }
    path = tiny_gguf(tmp_path / "x.gguf", architecture=architecture, extra=swapped)
    with pytest.raises(GgufError, match=f"'{names[0]}' has the shape"):
        GgufSource(path)


@pytest.mark.parametrize("texts", [{"llama.rope.scaling.type": "none"}, {}])
def test_a_scaling_of_none_scales_nothing(tmp_path: Path, texts: dict[str, str]) -> None:
    factor = 4.0 if texts else 0.0  # as llama.cpp has it
    numbers: dict[str, int | float] = {"rope.scaling.factor": factor}
    path = tiny_gguf(tmp_path / "x.gguf", numbers=numbers, texts=texts)
    assert GgufSource(path).config("float32").rope_factors == ()


def test_rope_factors_are_not_read_when_there_are_too_many(tmp_path: Path) -> None:
    """A file with holes may claim terabytes of them."""
    data = tiny_gguf(
        tmp_path / "x.gguf",
        extra={"rope_freqs.weight": quantised(np.ones(32), Kind.F32)},
    ).read_bytes()
    entry = text(b"rope_freqs.weight") + struct.pack("<IQ", 1, 32)
    assert data.count(entry) == 1
    path = tmp_path / "holes.gguf"
    path.write_bytes(data.replace(entry, entry[:-8] + struct.pack("<Q", 1 << 36)))
    os.truncate(path, 1 << 39)
    start = time.perf_counter()
    with pytest.raises(GgufError, match=r"'rope_freqs\.weight' has the shape \(68719476736,\)"):
        GgufSource(path)
    assert time.perf_counter() - start < 1.0


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": (np.zeros((4, 256), np.float32), Kind.F32)}
    path = tiny_gguf(tmp_path / "x.gguf", extra=extra)
    with pytest.raises(GgufError, match=r"ffn_gate_inp\.weight' is not supported"):
        GgufSource(path)


def test_an_unsupported_tokenizer_is_named(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "x.gguf", texts={"tokenizer.ggml.pre": "deepseek-coder"})
    with pytest.raises(GgufError, match="'deepseek-coder'"):
        GgufSource(path).write_tokenizer(tmp_path)


@pytest.mark.parametrize("merge", ["he", "q zz", "h q", " ", ""])
def test_a_merge_that_makes_no_token_is_named(tmp_path: Path, merge: str) -> None:
    metadata = GgufFile(tiny_gguf(tmp_path / "x.gguf")).metadata
    with pytest.raises(GgufError, match=f"tokenizer.ggml.merges has '{merge}', not two"):
        tokenizer_json(metadata | {"tokenizer.ggml.merges": ["h e", merge]})
