"""What only a device can show: FlashInfer's kernels, the captured graphs, time per step.

    python -m pytest -m gpu tests/gpu -s

Models are bfloat16, in which the two back ends round differently. So the reference is
teacher-forced: at every position both see the same tokens, logits are compared, and the
choice must be the same wherever the reference's top two are further apart than rounding.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from blitzd.engine.arena import Arena
from blitzd.engine.attention import TorchAttention
from blitzd.engine.batch import BatchLayout
from blitzd.engine.catalogue import CATALOGUE, DEFAULT_MODEL, is_pulled, prepared_dir, resolve
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.llama import Llama
from blitzd.engine.prepare import prepare
from tests.tiny import make_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCK, BLOCKS, GRAPH_ROWS = 64, 96, 8
GAP = 0.25
"""Of two logits that bfloat16 may turn around; its step at 16 is 0.0625 or 0.125."""


class Forward:
    """A model over one back end, planned batch by planned batch."""

    def __init__(self, directory: Path, device: torch.device | None, graphs: bool = False) -> None:
        host = Arena.open(directory)
        self.config = config = host.config
        self.arena = Arena(config, host.layout, host.buffer, device)
        geometry = KvGeometry.of(config, BLOCKS, BLOCK)
        self.cache = KvCache(geometry, bytearray(geometry.bytes), device)
        if device is None:
            self.attention = TorchAttention(self.cache, config.heads, config.sliding_window)
            self.model = Llama(config, self.arena, self.attention)
            self.graphs = None
            return
        from blitzd.engine.attention_flashinfer import FlashInferAttention
        from blitzd.engine.decode_graphs import DecodeGraphs

        self.attention = FlashInferAttention(  # type: ignore[assignment]
            self.cache,
            config.heads,
            config.sliding_window,
            graph_rows=GRAPH_ROWS if graphs else 0,
            context_tokens=config.context_tokens,
        )
        self.model = Llama(config, self.arena, self.attention)
        self.graphs = DecodeGraphs(self.model, self.attention) if graphs else None  # type: ignore[arg-type]

    def hidden(self, batch: BatchLayout, ids: list[int], splits: tuple[int, ...]) -> torch.Tensor:
        self.attention.plan(batch)
        hidden = self.model.embed(ids)
        positions = torch.tensor(batch.positions())
        if self.graphs is not None and not splits:
            return self.graphs.run(hidden, positions)
        for first, last in pairwise([0, *splits, self.config.layers]):
            hidden = self.model.run_layers(hidden, positions, first, last)
        return hidden

    @torch.inference_mode()
    def logits(
        self, prompts: list[list[int]], chunk: int, decoded: int, splits: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """[requests, positions, vocab] on the host: the last `decoded` tokens of every prompt
        are computed one by one in a batch, what comes before them in chunks."""
        sequences = [(ids[:-decoded], ids[-decoded:]) for ids in prompts]
        need = [-(-len(ids) // BLOCK) for ids in prompts]
        # In turns, so that a request's blocks are scattered.
        tables = [[turn * len(prompts) + i for turn in range(need[i])] for i in range(len(prompts))]
        for start in range(0, max(len(head) for head, _ in sequences), chunk):
            part = [
                (head[start : start + chunk], table)
                for (head, _), table in zip(sequences, tables, strict=True)
                if head[start : start + chunk]
            ]
            news, their = [new for new, _ in part], [table for _, table in part]
            batch = BatchLayout([len(n) for n in news], [start + len(n) for n in news], their)
            self.hidden(batch, [i for new in news for i in new], splits)
        rows = []
        for step in range(decoded):
            contexts = [len(head) + step + 1 for head, _ in sequences]
            batch = BatchLayout([1] * len(prompts), contexts, tables)
            hidden = self.hidden(batch, [tail[step] for _, tail in sequences], splits)
            rows.append(self.model.logits(hidden))
        return torch.stack(rows, 1)


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Prints how near they are; the choice is the same wherever it is not a near tie."""
    top = expected.topk(2).values
    sure = top[..., 0] - top[..., 1] > GAP
    same = found.argmax(-1) == expected.argmax(-1)
    p, q = expected.log_softmax(-1), found.log_softmax(-1)
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    print(
        f"same token {int(same.sum())} of {same.numel()} ({int((~sure).sum())} near ties), "
        f"mean KL {divergence:.2e}"
    )
    assert bool(same[sure].all())
    assert int(sure.sum()) >= sure.numel() // 4, "near ties leave little to compare"
    assert divergence < 0.02


def prompts_for(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, vocab, (length,), generator=generator).tolist()
        for length in (20, 70, 128, 129, 300)
    ]


@pytest.fixture(
    scope="module",
    params=[
        {"heads": 6, "kv_heads": 2},
        {"heads": 8, "kv_heads": 2},
        {"heads": 7, "kv_heads": 1, "head_dim": 128},
        {"heads": 4, "kv_heads": 4, "sliding_window": 50, "qkv_bias": True},
    ],
    ids=["group-3", "group-4", "group-7-of-128", "window"],
)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"head_dim": 64, "hidden": 128, "ffn": 256} | request.param
    return make_tiny(tmp_path_factory.mktemp("gpu") / "tiny", "bfloat16", **shape)


@pytest.mark.parametrize("chunk", [37, 64, 1000])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_tiny_model_chooses_as_the_torch_back_end(tiny: Path, chunk: int, graphs: bool) -> None:
    expected, found = Forward(tiny, None), Forward(tiny, torch.device("cuda"), graphs)
    prompts = prompts_for(expected.config.vocab)
    assert_alike(found.logits(prompts, chunk, 12), expected.logits(prompts, chunk, 12))


def test_layer_ranges_give_what_the_whole_gives(tiny: Path) -> None:
    whole, cut = (Forward(tiny, torch.device("cuda")) for _ in range(2))
    prompts = prompts_for(whole.config.vocab)
    torch.testing.assert_close(
        cut.logits(prompts, 64, 8, splits=(1, 3)), whole.logits(prompts, 64, 8), rtol=0, atol=0
    )


@pytest.fixture(scope="module")
def embedded() -> Path:
    if not is_pulled(CATALOGUE[DEFAULT_MODEL]):
        pytest.skip("blitzd model pull was not run")
    return prepare(resolve(DEFAULT_MODEL), "bfloat16", prepared_dir())


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_the_embedded_model_chooses_as_the_torch_back_end(embedded: Path, graphs: bool) -> None:
    expected, found = Forward(embedded, None), Forward(embedded, torch.device("cuda"), graphs)
    prompts = prompts_for(20_000)
    assert_alike(found.logits(prompts, 128, 16), expected.logits(prompts, 128, 16))


def test_time_per_step(embedded: Path) -> None:
    """Prints, and asserts only that a graph is worth its memory at batch 1."""
    device = torch.device("cuda")
    took: dict[tuple[str, int], float] = {}
    for name in ("eager", "graphs"):
        forward = Forward(embedded, device, name == "graphs")
        for rows in (1, 4, 8):
            tables = [list(range(i * 8, i * 8 + 8)) for i in range(rows)]
            times = []
            for step in range(40):
                batch = BatchLayout([1] * rows, [300 + step] * rows, tables)
                torch.cuda.synchronize()
                began = time.perf_counter()
                forward.model.logits(forward.hidden(batch, [1] * rows, ())).argmax(-1).tolist()
                times.append(time.perf_counter() - began)
            took[name, rows] = sorted(times[10:])[15] * 1e3
    for (name, rows), ms in took.items():
        print(f"decode, batch {rows}, context 300, {name}: {ms:.3f} ms a step")
    assert took["graphs", 1] < took["eager", 1]
