"""The forward pass against Hugging Face's own, on tiny random models in float64."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from blitzd.engine.arena import Arena
from blitzd.engine.attention import TorchAttention
from blitzd.engine.batch import BatchLayout
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.llama import Llama
from tests.reference import reference_model
from tests.tiny import make_tiny

torch.set_num_threads(1)


class Engine:
    """Model, cache and attention over one prepared directory."""

    def __init__(self, directory: Path, blocks: int = 64, block_tokens: int = 16) -> None:
        self.arena = Arena.open(directory)
        geometry = KvGeometry.of(self.arena.config, blocks, block_tokens)
        self.cache = KvCache(geometry, bytearray(geometry.bytes))
        self.attention = TorchAttention(self.cache, self.arena.config.heads)
        self.model = Llama(self.arena.config, self.arena, self.attention)

    def step(
        self, batch: BatchLayout, ids: list[int], splits: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """Logits of every row, with the layers run in the pieces that `splits` cut."""
        self.attention.plan(batch)
        hidden = self.model.embed(ids)
        bounds = [0, *splits, self.arena.config.layers]
        for first, last in pairwise(bounds):
            hidden = self.model.run_layers(hidden, batch.positions(), first, last)
        return self.model.logits(hidden)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", "float64")


@pytest.fixture(scope="module")
def expected(directory: Path) -> tuple[list[int], torch.Tensor]:
    """150 ids, and transformers' logits after each."""
    ids = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        logits = reference_model(Arena.open(directory))(ids[None]).logits[0]
    return ids.tolist(), logits


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 64, 149, 150])
@pytest.mark.parametrize("splits", [(), (1,), (2, 3)])
def test_chunked_prefill_in_layer_ranges_equals_transformers(
    directory: Path, expected: tuple[list[int], torch.Tensor], chunk: int, splits: tuple[int, ...]
) -> None:
    ids, logits = expected
    engine = Engine(directory)
    table = torch.randperm(64, generator=torch.Generator().manual_seed(chunk)).tolist()
    found = []
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk]
        batch = BatchLayout([len(piece)], [start + len(piece)], [table])
        found.append(engine.step(batch, piece, splits))
    torch.testing.assert_close(torch.cat(found), logits, rtol=0, atol=1e-9)
