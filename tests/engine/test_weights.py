"""Weights mapped and weights copied are the same weights, to the last bit, apart from whose."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from blitzd.engine.arena import Arena
from blitzd.engine.errors import Corrupt
from blitzd.engine.layout import read_model_file
from blitzd.engine.options import Weights
from blitzd.engine.prepared import open_prepared
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import LocalReplica, request
from tests.tiny import make_tiny

HOW: tuple[Weights, ...] = get_args(Weights)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


def mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_copy_is_the_file_and_maps_nothing_of_it(model: Path) -> None:
    mapped, copied = Arena.open(model), Arena.open(model, "copy")
    assert mapped.buffer == copied.buffer == (model / "arena.bin").read_bytes()
    assert mappings(model / "arena.bin") == 1
    del mapped
    assert mappings(model / "arena.bin") == 0
    assert copied.verify() == []


def test_tokens_do_not_depend_on_how_weights_are_held(model: Path) -> None:
    prompts = {1: "a", 2: "The capital of France", 3: "x" * 700}
    tokens = {}
    for how in HOW:
        replica = LocalReplica(model, weights=how)
        replica.prefill(*(request(n, prompt, 24) for n, prompt in prompts.items()))
        tokens[how] = {n: output.tokens for n, output in replica.until(*prompts).items()}
        assert (mappings(model / "arena.bin") > 0) == (how == "map")
        replica.close()
    assert tokens["map"] == tokens["copy"]


@pytest.mark.parametrize("how", HOW)
def test_progress_says_which_layers_are_ready_and_where_they_came_from(
    model: Path, how: Weights
) -> None:
    seen: list[pb.LoadProgress] = []
    open_prepared(model, seen.append, how)
    layout = read_model_file(model).layout
    assert [p.layers_ready for p in seen] == [0, 1, 2, 3, 4, 4]
    assert [p.bytes_loaded for p in seen] == [s.offset + s.length for s in layout.sections]
    assert {p.source for p in seen} == {"map" if how == "map" else "disk"}


@pytest.mark.parametrize("how", HOW)
def test_a_section_that_is_not_what_was_prepared_is_named(tmp_path: Path, how: Weights) -> None:
    directory = make_tiny(tmp_path / "tiny")
    offset, _ = read_model_file(directory).layout.layer_range(2)
    with (directory / "arena.bin").open("r+b") as handle:
        handle.seek(offset + 100)
        handle.write(b"\x55")
    seen: list[pb.LoadProgress] = []
    with pytest.raises(Corrupt, match="layer 2 of tiny has digest"):
        open_prepared(directory, seen.append, how)
    assert seen[-1].layers_ready == 2


@pytest.mark.parametrize("how", HOW)
def test_a_file_of_another_length_is_refused(tmp_path: Path, how: Weights) -> None:
    directory = make_tiny(tmp_path / "tiny")
    length = (directory / "arena.bin").stat().st_size
    with (directory / "arena.bin").open("r+b") as handle:
        handle.truncate(length - 4096)
    with pytest.raises(Corrupt, match=f"has {length - 4096} bytes, model.json says {length}"):
        open_prepared(directory, lambda progress: None, how)
    with pytest.raises(ValueError, match=r"ends \d+ bytes early|; its layout says"):
        Arena.open(directory, how)
