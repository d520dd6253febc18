"""The FlashInfer back end's own half: what it plans, and which kernel gets which rows.

No device is needed; `tests/gpu` has what only a device can show.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from blitzd.engine import attention, attention_flashinfer
from blitzd.engine.attention import TorchAttention
from blitzd.engine.attention_flashinfer import FlashInferAttention
from blitzd.engine.batch import BatchLayout
from blitzd.engine.device import unsupported
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.llama import Llama
from blitzd.engine.page_tables import PageTables
from tests.engine.flashinfer_contract import Library
from tests.engines import Engine, Sequence
from tests.tiny import make_tiny, tiny_config

BLOCKS, BLOCK, KV_HEADS, HEAD_DIM = 40, 8, 2, 4

PROMPTS = [b"The capital of France", b"a", b"x" * 40, b"na\xc3\xafve caf\xc3\xa9", b"y" * 16]


@pytest.fixture(scope="module", autouse=True)
def small_workspace() -> Iterator[None]:
    """The stand-in splits no context, and 128 MiB of zeros take a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_flashinfer, "WORKSPACE_BYTES", 1 << 13)
        yield


@st.composite
def layouts(draw: st.DrawFn) -> BatchLayout:
    """Any mix of decodes, chunks and whole prompts, some of them sharing a prefix's blocks."""
    queries, contexts, tables = [], [], []
    blocks = draw(st.permutations(range(BLOCKS)))
    shared, free = list(blocks[:2]), list(blocks[2:])
    for _ in range(draw(st.integers(1, 6))):
        context = draw(st.integers(1, 5 * BLOCK))
        query = draw(st.one_of(st.just(1), st.just(context), st.integers(1, context)))
        needed = -(-context // BLOCK)
        # Blocks that are written are a request's own; one more may be there for later.
        common = min(2, (context - query) // BLOCK) if draw(st.booleans()) else 0
        own = needed - common + draw(st.integers(0, 1))
        tables.append(shared[:common] + [free.pop() for _ in range(own)])
        queries.append(query)
        contexts.append(context)
    return BatchLayout(queries, contexts, tables)


def cache_of(dtype: str = "float64", kv_heads: int = KV_HEADS) -> KvCache:
    geometry = KvGeometry(2, BLOCKS, kv_heads, HEAD_DIM, dtype, BLOCK)  # type: ignore[arg-type]
    cache = KvCache(geometry, bytearray(geometry.bytes))
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(5)))
    return cache


@given(batch=layouts())
@settings(max_examples=60, deadline=None)
def test_pages_name_the_tokens_that_the_torch_back_end_reads(batch: BatchLayout) -> None:
    """Each back end derives from one batch where its keys are; over a plane that holds its
    own token numbers both must read the same ones, in the same order."""
    plane = torch.arange(BLOCKS * BLOCK).view(BLOCKS, BLOCK, 1, 1)
    tables = PageTables.of(batch, BLOCK)
    torch_back_end = TorchAttention(cache_of(), KV_HEADS)
    torch_back_end.plan(batch)
    plan = torch_back_end._plan
    assert plan is not None
    assert plan.slots.tolist() == batch.slots(BLOCK)

    read_by_torch: dict[int, list[int]] = {}
    for prefill in plan.prefills:
        read = attention._read(plane, prefill.span, 1)
        read_by_torch[prefill.start] = read.flatten().tolist()
    for decode in plan.decodes:
        rows = range(plan.rows) if decode.rows is None else decode.rows.tolist()
        read = attention._read(plane, decode.span, decode.requests).flatten(1)
        for index, row in enumerate(rows):
            visible = slice(None) if decode.mask is None else decode.mask[index].flatten() == 0
            read_by_torch[row] = read[index][visible].tolist()

    numbers = plane.flatten().view(BLOCKS, BLOCK)
    assert tables.qo_indptr[-1] == plan.rows
    for i, context in enumerate(batch.context_lens):
        pages = tables.kv_indices[tables.kv_indptr[i] : tables.kv_indptr[i + 1]]
        length = (len(pages) - 1) * BLOCK + tables.last_page_len[i]
        assert length == context
        found = numbers[pages].flatten()[:length].tolist()
        assert found == read_by_torch[tables.qo_indptr[i]]
        new = found[context - batch.query_lens[i] :]
        assert new == plan.slots[tables.qo_indptr[i] : tables.qo_indptr[i + 1]].tolist()


@given(
    batch=layouts(),
    window=st.sampled_from([0, 1, 5, 100]),
    group=st.sampled_from([1, 3, 7]),
    graph_rows=st.sampled_from([0, 4]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_both_back_ends_attend_alike(
    batch: BatchLayout, window: int, group: int, graph_rows: int, seed: int
) -> None:
    heads = KV_HEADS * group
    ours, theirs = cache_of(), cache_of()
    expected = TorchAttention(ours, heads, window)
    found = FlashInferAttention(
        theirs, heads, window, graph_rows=graph_rows, context_tokens=64, library=Library()
    )
    expected.plan(batch)
    found.plan(batch)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        # As in the model, parts of one tensor: not contiguous.
        qkv = torch.randn(
            batch.rows, heads + 2 * KV_HEADS, HEAD_DIM, dtype=torch.float64, generator=generator
        )
        q, k, v = qkv.split([heads, KV_HEADS, KV_HEADS], 1)
        torch.testing.assert_close(
            found.run(layer, q, k, v), expected.run(layer, q, k, v), rtol=0, atol=1e-12
        )
    for cache in (ours, theirs):  # what nobody has written yet only one of them clears
        for table, context in zip(batch.block_tables, batch.context_lens, strict=True):
            cache.clear_after(table, context)
    assert torch.equal(ours.tensor, theirs.tensor)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 9}], ids=["full", "window"])
@pytest.mark.parametrize("graph_rows", [0, 8])
def test_a_model_over_it_makes_the_tokens_of_the_torch_back_end(
    tmp_path: Path, graph_rows: int, changes: dict[str, int]
) -> None:
    directory = make_tiny(tmp_path / "tiny", "float64", **changes)
    library = Library()
    expected, found = Engine(directory), Engine(directory)
    config = found.arena.config
    found.attention = FlashInferAttention(  # type: ignore[assignment]
        found.cache,
        config.heads,
        config.sliding_window,
        graph_rows=graph_rows,
        context_tokens=256,
        library=library,
    )
    found.model = Llama(config, found.arena, found.attention)
    outputs = []
    for engine in (expected, found):
        sequences = [Sequence(list(prompt), 9) for prompt in PROMPTS]
        engine.generate(sequences, chunk=16)
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    for wrapper in ("Decode", "PrefillWithPaged", "PrefillWithRagged"):
        assert library.count(wrapper, "run") > 0, f"the prompts do not reach {wrapper}"


def test_each_part_of_a_batch_gets_the_kernel_that_fits_it() -> None:
    library = Library()
    back_end = FlashInferAttention(
        cache_of(), KV_HEADS, graph_rows=2, context_tokens=16, library=library
    )
    one, two = [0], [1, 2]

    def planned(*requests: tuple[int, int, list[int]]) -> tuple[int, int, int, int]:
        names = ("Decode", "PrefillWithPaged", "PrefillWithRagged")
        before = [library.count(name, "plan") for name in names]
        back_end.plan(BatchLayout(*zip(*requests, strict=True)))
        after = [library.count(name, "plan") for name in names]
        decode, paged, ragged = (b - a for a, b in zip(before, after, strict=True))
        return decode, paged, ragged, back_end.captured_rows

    assert planned((1, 8, one), (1, 16, two)) == (1, 0, 0, 2)
    assert planned((1, 8, one), (1, 16, two), (1, 3, [3])) == (1, 0, 0, 0), "three are too many"
    assert planned((1, 33, [0, 1, 2, 3, 4])) == (1, 0, 0, 0), "more pages than the graphs' buffer"
    assert planned((8, 8, one), (16, 16, two)) == (0, 0, 1, 0)
    assert planned((8, 8, one), (2, 16, two)) == (0, 1, 0, 0)
    assert planned((1, 8, one), (16, 16, two)) == (1, 0, 1, 0)
    assert planned((1, 8, one), (2, 16, two)) == (1, 1, 0, 0)
    assert planned((16, 16, two), (1, 8, one)) == (0, 1, 0, 0), "one token, but not in front"


def test_buffers_of_a_graph_stay_where_they_are() -> None:
    """What a captured graph reads is found at the addresses that it was captured with."""
    library = Library()
    back_end = FlashInferAttention(
        cache_of(), KV_HEADS, graph_rows=4, context_tokens=64, library=library
    )
    seen = []
    for contexts in ([8, 16], [9, 30]):
        back_end.plan(BatchLayout([1, 1], contexts, [[0, 1], [2, 3, 4, 5]]))
        assert back_end._plan is not None
        seen.append((back_end._plan.slots.data_ptr(), id(back_end._plan.decode)))
        assert back_end._plan.slots.tolist() == [
            (contexts[0] - 1) // BLOCK * BLOCK + (contexts[0] - 1) % BLOCK,
            [2, 3, 4, 5][(contexts[1] - 1) // BLOCK] * BLOCK + (contexts[1] - 1) % BLOCK,
        ]
        back_end.plan(BatchLayout([1], [4], [[7]]))
    assert seen[0] == seen[1]
    assert library.count("Decode", "__init__") == 3, "one for any batch, one a captured size"


def test_a_batch_that_would_touch_other_blocks_is_refused() -> None:
    back_end = FlashInferAttention(cache_of(), KV_HEADS, library=Library())
    rows = torch.zeros(1, KV_HEADS, HEAD_DIM, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="planned were none"):
        back_end.run(0, rows, rows, rows)
    back_end.plan(BatchLayout([1], [1], [[0]]))
    with pytest.raises(ValueError, match=rf"names a block outside \[0, {BLOCKS}\)"):
        back_end.plan(BatchLayout([1], [1], [[BLOCKS]]))
    with pytest.raises(RuntimeError, match="planned were none"):
        back_end.run(0, rows, rows, rows)
    with pytest.raises(ValueError, match="3 heads cannot share 2 KV heads"):
        FlashInferAttention(cache_of(), 3, library=Library())


def test_models_that_it_cannot_run_are_named() -> None:
    assert unsupported(tiny_config("bfloat16", head_dim=64)) is None
    assert unsupported(tiny_config("float32", head_dim=64)) == (
        "dtype: float32; accepted on cuda: bfloat16, float16"
    )
    assert unsupported(tiny_config("bfloat16")) == "head_dim: 8; accepted on cuda: 64, 128, 256"


def test_calls_fit_the_installed_library() -> None:
    """Every call that the tests above make, bound against FlashInfer's own signatures."""
    flashinfer = pytest.importorskip(
        "flashinfer", reason="flashinfer is not installed (the extra blitzd[cuda])"
    )
    assert importlib.metadata.version("flashinfer-python") == "0.7.4", "the pinned version"
    library = Library()
    back_end = FlashInferAttention(
        cache_of(), KV_HEADS, graph_rows=1, context_tokens=64, library=library
    )
    for batch in (
        BatchLayout([1], [9], [[0, 1]]),
        BatchLayout([1, 1], [9, 4], [[0, 1], [2]]),
        BatchLayout([9], [9], [[0, 1]]),
        BatchLayout([4], [9], [[0, 1]]),
    ):
        back_end.plan(batch)
        rows = torch.zeros(batch.rows, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        back_end.run(0, rows, rows, rows)
    bound = set()
    for name, method, args, kwargs in library.calls:
        wrapper = getattr(flashinfer, name)
        # The decode wrapper's `plan` hands everything to this one.
        inner = "_plan_impl" if (name, method) == (_DECODE, "plan") else method
        inspect.signature(getattr(wrapper, inner)).bind(None, *args, **kwargs)
        bound.add((name, method))
    assert len(bound) == 9


_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
