"""The forward pass against Hugging Face's own, on tiny random models in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from blitzd.engine.arena import Arena
from blitzd.engine.batch import BatchLayout
from tests.engines import Engine, Sequence
from tests.reference import reference_model
from tests.tiny import make_tiny

SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one head each": {"heads": 4, "kv_heads": 4, "head_dim": 12},
    "one KV head, own output head": {"hidden": 40, "heads": 5, "kv_heads": 1, "tied_head": False},
    "one layer, wide heads": {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 64},
}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "-"))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny(target, "float64", **SHAPES[request.param])


def reference_logits(directory: Path, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(Arena.open(directory))(torch.tensor([ids])).logits
    return logits[0]


def random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64, 149, 150])
def test_chunked_prefill_in_layer_ranges_equals_transformers(directory: Path, chunk: int) -> None:
    ids = random_ids(150, 7)
    expected = reference_logits(directory, ids)
    layers = Arena.open(directory).config.layers
    for splits in [(), tuple(range(1, layers)), (layers // 2,)]:
        engine = Engine(directory)
        engine.splits = splits
        table = torch.randperm(64, generator=torch.Generator().manual_seed(chunk)).tolist()
        found = []
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            batch = BatchLayout([len(piece)], [start + len(piece)], [table])
            found.append(engine.model.logits(engine.step(batch, piece)))
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("together", [1, 4, 16])
@pytest.mark.parametrize("chunk", [5, 32, 1000])
def test_greedy_tokens_of_any_batch_equal_transformers(
    directory: Path, together: int, chunk: int
) -> None:
    lengths = [1, 15, 16, 17, 130, 64, 2, 90, 33, 31, 32, 48, 100, 3, 77, 5]
    sequences = [
        Sequence(random_ids(length, seed), 12) for seed, length in enumerate(lengths[:together])
    ]
    engine = Engine(directory, blocks=96)
    engine.generate(sequences, chunk)
    for sequence in sequences:
        logits = reference_logits(directory, sequence.ids)
        expected = logits[len(sequence.prompt) - 1 : -1].argmax(-1).tolist()
        assert sequence.output == expected


def test_a_suspended_batch_is_taken_up_after_another_ran(directory: Path) -> None:
    """Hidden states wait at a layer while the cache serves others."""
    engine = Engine(directory)
    layers = engine.arena.config.layers
    ids, others = random_ids(40, 1), random_ids(23, 2)
    batch = BatchLayout([40], [40], [[3, 1, 2]])
    engine.attention.plan(batch)
    hidden = engine.model.run_layers(engine.model.embed(ids), batch.positions(), 0, layers // 2)
    engine.step(BatchLayout([23], [23], [[9, 7]]), others)
    engine.attention.plan(batch)
    hidden = engine.model.run_layers(hidden, batch.positions(), layers // 2, layers)
    torch.testing.assert_close(
        engine.model.logits(hidden), reference_logits(directory, ids), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (BatchLayout([2], [1], [[0]]), "request 0 has 2 new tokens of 1"),
        (BatchLayout([0], [1], [[0]]), "request 0 has 0 new tokens of 1"),
        (BatchLayout([1, 1], [1, 17], [[0], [1]]), "request 1 has 1 blocks of 16 tokens"),
        (BatchLayout([1], [1], [[64]]), r"request 0 names a block outside \[0, 64\)"),
        (BatchLayout([1], [1], [[-1]]), r"request 0 names a block outside \[0, 64\)"),
        (BatchLayout([1], [1], []), "1 query lengths, 1 context lengths and 0 block tables"),
    ],
)
def test_a_batch_that_would_touch_other_blocks_is_refused(
    directory: Path, batch: BatchLayout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(directory).attention.plan(batch)


def test_rows_that_were_not_planned_are_refused(directory: Path) -> None:
    engine = Engine(directory)
    with pytest.raises(RuntimeError, match="planned were none"):
        engine.model.run_layers(engine.model.embed([1]), [0], 0, 1)
    with pytest.raises(ValueError, match=r"layers \[1, 9\)"):
        engine.model.run_layers(engine.model.embed([1]), [0], 1, 9)
    with pytest.raises(IndexError):
        engine.model.embed([100_000])
