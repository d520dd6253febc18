"""The cache's geometry: bytes that another cache can take over."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given, strategies as st

from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from tests.tiny import tiny_config


def geometry(blocks: int, **changes: object) -> KvGeometry:
    values: dict[str, object] = {
        "layers": 3, "kv_heads": 2, "head_dim": 4, "dtype": "float32", "block_tokens": 8,
    }  # fmt: skip
    return KvGeometry(blocks=blocks, **(values | changes))  # type: ignore[arg-type]


def filled(shape: KvGeometry, seed: int) -> KvCache:
    cache = KvCache(shape, bytearray(shape.bytes))
    cache.tensor.copy_(
        torch.rand(cache.tensor.shape, generator=torch.Generator().manual_seed(seed))
    )
    return cache


def gather(cache: KvCache, block_ids: list[int]) -> bytes:
    return b"".join(cache.buffer[a : a + n] for a, n in cache.geometry.segments(block_ids))


def scatter(cache: KvCache, block_ids: list[int], data: bytes) -> None:
    at = 0
    for offset, length in cache.geometry.segments(block_ids):
        cache.buffer[offset : offset + length] = data[at : at + length]
        at += length
    assert at == len(data)


@given(data=st.data(), count=st.integers(1, 6))
def test_blocks_move_between_caches_of_any_size(data: st.DataObject, count: int) -> None:
    source, target = filled(geometry(12), 1), filled(geometry(20), 2)
    theirs = data.draw(st.permutations(range(12)))[:count]
    ours = data.draw(st.permutations(range(20)))[:count]
    before = target.tensor.clone()
    scatter(target, ours, gather(source, theirs))
    for layer in range(3):
        for moved, here in zip(source.planes(layer), target.planes(layer), strict=True):
            torch.testing.assert_close(here[ours], moved[theirs], rtol=0, atol=0)
    kept = [block for block in range(20) if block not in ours]
    assert torch.equal(target.tensor[:, :, kept], before[:, :, kept])


def test_neighbours_form_one_segment() -> None:
    shape = geometry(10)
    piece = 8 * 2 * 4 * 4
    segments = shape.segments([4, 5, 6, 9])
    assert len(segments) == 3 * 2 * 2
    assert segments[:2] == [(4 * piece, 3 * piece), (9 * piece, piece)]
    assert sum(length for _, length in segments) == 4 * shape.block_bytes
    assert shape.bytes == 10 * shape.block_bytes
    with pytest.raises(ValueError, match="block 10 is outside"):
        shape.segments([10])


def test_layout_says_what_can_be_exchanged() -> None:
    assert geometry(3).layout == geometry(99).layout
    others = [{"layers": 4}, {"kv_heads": 1}, {"head_dim": 8}, {"dtype": "float64"}]
    others.append({"block_tokens": 16})
    assert len({geometry(3).layout, *(geometry(3, **change).layout for change in others)}) == 6
    assert KvGeometry.of(tiny_config(), 5).block_tokens == 64


def test_the_buffer_must_fit_and_be_writable() -> None:
    shape = geometry(4)
    with pytest.raises(ValueError, match=f"{shape.bytes} are needed"):
        KvCache(shape, bytearray(shape.bytes - 1))
    with pytest.raises(ValueError, match="read-only"):
        KvCache(shape, bytes(shape.bytes))
    shared = mmap.mmap(-1, shape.bytes + 4096)
    cache = KvCache(shape, shared)
    cache.planes(2)[1][3, 7, 1, 3] = 1.0
    last = shape.bytes - 4
    assert shared[last : last + 4] == b"\x00\x00\x80\x3f"


def test_a_device_cache_moves_through_its_staging_buffer() -> None:
    """Blocks leave one device and reach another as bytes of the two buffers; nothing else
    of either is touched."""
    here = torch.device("cpu")  # apart from its buffer all the same
    source, target = (
        KvCache(geometry(blocks), bytearray(geometry(blocks).bytes), here) for blocks in (12, 20)
    )
    assert source.staged and not filled(geometry(2), 1).staged
    source.tensor.copy_(torch.randn(source.tensor.shape))
    target.tensor.copy_(torch.randn(target.tensor.shape))
    before = target.tensor.clone()
    theirs, ours = [7, 3, 4], [0, 19, 5]
    assert not any(gather(source, theirs)), "nothing is there before it is staged"
    source.stage_out(theirs)
    scatter(target, ours, gather(source, theirs))
    assert torch.equal(target.tensor, before)
    target.stage_in(ours)
    assert torch.equal(target.tensor[:, :, ours], source.tensor[:, :, theirs])
    kept = [block for block in range(20) if block not in ours]
    assert torch.equal(target.tensor[:, :, kept], before[:, :, kept])
    others = [block for block in range(12) if block not in theirs]
    assert not any(gather(source, others))
