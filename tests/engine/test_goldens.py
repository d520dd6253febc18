"""Greedy tokens of the embedded model in float32 equal transformers' (scripts/make_goldens.py),
one by one and in batches, whatever the prompt's length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blitzd.engine.arena import Arena
from blitzd.engine.catalogue import CATALOGUE, DEFAULT_MODEL, is_pulled, prepared_dir, resolve
from blitzd.engine.prepare import prepare
from blitzd.engine.tokenizer import Tokenizer
from tests.engines import Engine, Sequence

PATH = Path(__file__).parent.parent / "data/goldens/smollm2-135m-float32.json"
DOCUMENT = json.loads(PATH.read_text())
CASES = {case["name"]: case for case in DOCUMENT["cases"]}
SHORT = [name for name, case in CASES.items() if len(case["prompt_ids"]) <= 130]
LONG = [name for name in CASES if name not in SHORT]

pytestmark = pytest.mark.skipif(
    not is_pulled(CATALOGUE[DEFAULT_MODEL]), reason="blitzd model pull was not run"
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare(resolve(DEFAULT_MODEL), "float32", prepared_dir())


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return Engine(directory, blocks=192, block_tokens=64)


def assert_equal_tokens(engine: Engine, cases: list[dict[str, Any]], chunk: int = 512) -> None:
    sequences = [Sequence(case["prompt_ids"], len(case["output_ids"])) for case in cases]
    engine.generate(sequences, chunk)
    for case, sequence in zip(cases, sequences, strict=True):
        assert sequence.output == case["output_ids"], case["name"]


def test_goldens_are_what_they_should_be(directory: Path) -> None:
    lengths = {len(case["prompt_ids"]) for case in CASES.values()}
    assert {1, 64, 65, 1500} <= lengths
    assert len(CASES) >= 30
    assert all(case["smallest_gap"] >= 1e-3 for case in CASES.values())
    assert all(len(case["output_ids"]) == 64 for case in CASES.values())
    assert Arena.open(directory).config.digest == DOCUMENT["digest"]


def test_prompts_encode_to_the_ids_that_transformers_gave(directory: Path) -> None:
    tokenizer = Tokenizer.from_dir(directory)
    for case in CASES.values():
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]
        if "messages" in case:
            assert tokenizer.render_chat(case["messages"]) == case["prompt"]


@pytest.mark.parametrize("name", ["chat-0", "chat-4", "one", "length-64", "length-65"])
def test_alone(engine: Engine, name: str) -> None:
    assert_equal_tokens(engine, [CASES[name]])


def test_four_together(engine: Engine) -> None:
    assert_equal_tokens(engine, [CASES[name] for name in ("one", "chat-5", "length-64", "plain-5")])


@pytest.mark.parametrize("half", [0, 1])
def test_sixteen_together_in_odd_chunks(engine: Engine, half: int) -> None:
    assert_equal_tokens(engine, [CASES[name] for name in SHORT[half::2]][:16], chunk=37)


def test_long_prompts_together(engine: Engine) -> None:
    names = ("length-300", "length-777", "length-1500")
    assert_equal_tokens(engine, [CASES[name] for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_every_case_alone(engine: Engine, name: str) -> None:
    assert_equal_tokens(engine, [CASES[name]])


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_prompts_in_odd_chunks_and_layer_ranges(engine: Engine, name: str) -> None:
    engine.splits = (1, 13, 29)
    try:
        assert_equal_tokens(engine, [CASES[name]], chunk=301)
    finally:
        engine.splits = ()
