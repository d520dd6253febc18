"""Preparing a model: what the arena holds, once, whole, and for every source."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from blitzd.engine.arena import Arena
from blitzd.engine.layout import layout_of, read_model_file
from blitzd.engine.model_config import Dtype, check_config
from blitzd.engine.prepare import build, interleave, prepare, to_dtype
from blitzd.engine.tokenizer import Tokenizer
from tests.gguf_files import quantised, tiny_gguf, tiny_weights
from tests.hf_models import save
from tests.tiny import RandomSource, make_tiny, tiny_config


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_the_arena_holds_the_dequantised_weights(tmp_path: Path, kind: Kind) -> None:
    arena = Arena.open(prepare(tiny_gguf(tmp_path / "m.gguf", kind), "float32", tmp_path / "c"))
    weights = {
        name: dequantize(*quantised(values, kind if values.ndim > 1 else Kind.F32))
        for name, values in tiny_weights().items()
    }

    def assert_equal(name: str, *parts: str) -> None:
        expected = np.concatenate([weights[part] for part in parts])
        np.testing.assert_array_equal(arena.tensor(name).numpy(), expected)

    assert_equal("embed", "token_embd.weight")
    assert_equal("norm", "output_norm.weight")
    for i in range(2):
        blk = f"blk.{i}."
        assert_equal(f"layers.{i}.qkv", *(f"{blk}attn_{part}.weight" for part in ("q", "k", "v")))
        assert_equal(f"layers.{i}.gate_up", blk + "ffn_gate.weight", blk + "ffn_up.weight")
        assert_equal(f"layers.{i}.attn_norm", blk + "attn_norm.weight")
        assert_equal(f"layers.{i}.mlp_norm", blk + "ffn_norm.weight")
        assert_equal(f"layers.{i}.o", blk + "attn_output.weight")
        assert_equal(f"layers.{i}.down", blk + "ffn_down.weight")
    assert arena.config.tied_head
    assert arena.config.eos_token_ids == (257,)


def test_qwen2_heads_are_interleaved_with_their_bias(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", architecture="qwen2", bias=True)
    arena = Arena.open(prepare(path, "float32", tmp_path / "c"))
    weights = tiny_weights(bias=True)
    qkv, bias = arena.tensor("layers.1.qkv"), arena.tensor("layers.1.qkv_bias")
    q, q_bias = weights["blk.1.attn_q.weight"], weights["blk.1.attn_q.bias"]
    # Dimension j of the first half of head 2 becomes 2j, of the second half 2j + 1.
    head = 2 * 64
    np.testing.assert_array_equal(qkv[head + 2 * 5].numpy(), q[head + 5])
    np.testing.assert_array_equal(qkv[head + 2 * 5 + 1].numpy(), q[head + 32 + 5])
    np.testing.assert_array_equal(bias[head + 2 * 5 + 1].numpy(), q_bias[head + 32 + 5])
    np.testing.assert_array_equal(qkv[-128:].numpy(), weights["blk.1.attn_v.weight"])
    np.testing.assert_array_equal(bias[-128:].numpy(), weights["blk.1.attn_v.bias"])


def test_interleave_pairs_the_halves() -> None:
    rows = np.arange(8).reshape(8, 1)
    assert interleave(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    values = np.concatenate([values, ties[np.isfinite(ties)]])
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16)
    np.testing.assert_array_equal(to_dtype(values, "bfloat16"), expected.numpy())


def test_layout_is_contiguous_aligned_and_in_canonical_order() -> None:
    config = tiny_config("bfloat16", tied_head=False, qkv_bias=True, layers=3)
    layout = layout_of(config)
    names = [section.name for section in layout.sections]
    assert names == ["embed", "layer 0", "layer 1", "layer 2", "tail"]
    assert layout.sections[0].offset == 0
    for section, following in zip(layout.sections, layout.sections[1:], strict=False):
        assert section.offset + section.length == following.offset
    assert layout.sections[-1].offset + layout.sections[-1].length == layout.length
    assert all(spec.offset % 64 == 0 for spec in layout.tensors)
    assert layout.layer_range(1) == (layout.sections[2].offset, layout.sections[2].length)
    with pytest.raises(ValueError, match="layer 3 is outside"):
        layout.layer_range(3)


def test_digests_are_of_the_bytes(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "tiny")
    file = read_model_file(directory)
    data = (directory / "arena.bin").read_bytes()
    for section in file.layout.sections:
        found = xxhash.xxh3_128(data[section.offset : section.offset + section.length])
        assert section.digest == found.hexdigest()
    assert Arena.open(directory).verify() == []
    assert file.config.digest == read_model_file(make_tiny(tmp_path / "again")).config.digest
    other = read_model_file(make_tiny(tmp_path / "other", seed=1)).config.digest
    assert other != file.config.digest


def test_a_damaged_section_is_named(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "tiny")
    offset, _ = read_model_file(directory).layout.layer_range(2)
    with (directory / "arena.bin").open("r+b") as handle:
        handle.seek(offset + 100)
        handle.write(b"\x55")
    assert Arena.open(directory).verify() == ["layer 2"]


def test_a_shared_mapping_cannot_be_written(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from blitzd.engine.arena import Arena\n"
        "Arena.open(Path(sys.argv[1])).tensor('embed').zero_()"
    )
    directory = make_tiny(tmp_path / "tiny")
    before = (directory / "arena.bin").read_bytes()
    done = subprocess.run([sys.executable, "-c", program, str(directory)], timeout=60)
    assert done.returncode != 0
    assert (directory / "arena.bin").read_bytes() == before


def test_a_second_prepare_finds_the_first(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    first = prepare(path, "float32", tmp_path / "c")
    inode = (first / "arena.bin").stat().st_ino
    assert prepare(path, "float32", tmp_path / "c") == first
    assert (first / "arena.bin").stat().st_ino == inode
    assert prepare(path, "bfloat16", tmp_path / "c") != first
    assert prepare(first, "float32", tmp_path / "c") == first


def test_a_broken_result_is_made_again(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    first = prepare(path, "float32", tmp_path / "c")
    (first / "arena.bin").write_bytes(b"short")
    assert Arena.open(prepare(path, "float32", tmp_path / "c")).verify() == []


def test_what_a_crash_of_the_machine_left_is_checked_once(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    first = prepare(path, "float32", tmp_path / "c")
    (mark,) = first.glob(".checked-*")
    mark.rename(first / ".checked-before-the-crash")
    inode = (first / "arena.bin").stat().st_ino
    assert prepare(path, "float32", tmp_path / "c") == first
    assert mark.exists()
    assert (first / "arena.bin").stat().st_ino == inode
    mark.unlink()
    with (first / "arena.bin").open("r+b") as handle:
        handle.write(bytes(4096))
    assert Arena.open(prepare(path, "float32", tmp_path / "c")).verify() == []
    assert (first / "arena.bin").stat().st_ino != inode


def _prepare(arguments: tuple[Path, Path]) -> tuple[Path, int]:
    source, cache = arguments
    directory = prepare(source, "float32", cache)
    return directory, (directory / "arena.bin").stat().st_ino


def test_processes_that_prepare_at_once_share_one_result(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.map(_prepare, [(path, tmp_path / "c")] * 6, chunksize=1)
    assert len(set(results)) == 1
    left = {p.name for p in (tmp_path / "c").iterdir() if not p.name.endswith(".lock")}
    assert left == {results[0][0].name}


def test_the_source_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        prepare(tmp_path / "nothing-here", "float32", tmp_path)
    with pytest.raises(ValueError, match="'int8'"):
        prepare(tmp_path, "int8", tmp_path)  # type: ignore[arg-type]
    directory = make_tiny(tmp_path / "tiny", "float32")
    with pytest.raises(ValueError, match="prepared as float32; bfloat16 was asked for"):
        prepare(directory, "bfloat16", tmp_path)


@pytest.mark.parametrize("field", ["tensors", "sections", "length"])
def test_a_layout_that_does_not_follow_from_its_config_is_refused(
    tmp_path: Path, field: str
) -> None:
    directory = make_tiny(tmp_path / "tiny")
    document = msgspec.json.decode((directory / "model.json").read_bytes())
    if field == "length":
        document["layout"]["length"] += 64
    else:
        document["layout"][field][1]["offset"] += 64
    (directory / "model.json").write_bytes(msgspec.json.encode(document))
    with pytest.raises(ValueError, match=r"model.json cannot be used"):
        Arena.open(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 4}, "heads is 6, which is not a multiple of kv_heads 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"layers": 0}, "layers is 0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_factors": (1.0,)}, "rope_factors has 1 values"),
        ({"eos_token_ids": (999,)}, "eos token 999"),
        ({"bos_token_id": 999}, "bos token 999"),
        ({"bos_token_id": -1}, "bos token -1"),
        ({"bos_token_id": 1 << 70}, "bos token 1180591620717411303424"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(tiny_config(**changes))


def test_preparing_needs_no_torch(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf")
    program = (
        "import sys; from pathlib import Path; from blitzd.engine.prepare import prepare\n"
        "from blitzd.engine.tokenizer import Tokenizer\n"
        "d = prepare(Path(sys.argv[1]), 'float32', Path(sys.argv[2])); Tokenizer.from_dir(d)\n"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(path), str(tmp_path / "c")]
    assert subprocess.run(command, timeout=60).returncode == 0


def test_a_gguf_brings_its_tokenizer(tmp_path: Path) -> None:
    path = tiny_gguf(
        tmp_path / "m.gguf", texts={"tokenizer.chat_template": "{{ messages[0].role }}"}
    )
    tokenizer = Tokenizer.from_dir(prepare(path, "float32", tmp_path / "c"))
    assert tokenizer.encode("he h<|im_end|>") == [256, ord(" "), ord("h"), 257]
    assert tokenizer.decode([256, 257, 33]) == "he!"
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "user"


@pytest.mark.parametrize(
    ("weight", "dtype", "message"),
    [
        (float("nan"), "float32", "the weight nan"),
        (float("-inf"), "bfloat16", "the weight -inf"),
        (-65536.0, "float16", "the weight -65536.0; float16 ends at 65504"),
        (3.4e38, "bfloat16", "the weight 3.4e+38; bfloat16 ends at 3.3895"),
        (1e39, "float32", "the weight 1e"),
    ],
)
def test_a_weight_that_is_no_number_is_refused_by_its_tensor(
    tmp_path: Path, weight: float, dtype: Dtype, message: str
) -> None:
    source = RandomSource(tiny_config())
    source.tensors["layers.2.down"][7, 5] = weight
    with pytest.raises(ValueError, match=r"tensor 'layers\.2\.down' has") as refused:
        build(source, dtype, tmp_path / "tiny")
    assert message in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_the_largest_weights_are_kept(tmp_path: Path) -> None:
    source = RandomSource(tiny_config())
    source.tensors["layers.2.down"][7, 5] = 65504.0
    build(source, "float16", tmp_path / "tiny")


def test_a_link_to_nothing_beside_a_model_is_no_part_of_it(tmp_path: Path) -> None:
    save(tmp_path / "hf", "llama tied")
    (tmp_path / "hf" / ".#config.json").symlink_to("somebody@somewhere.4711")
    assert (prepare(tmp_path / "hf", "float32", tmp_path / "c") / "model.json").exists()
