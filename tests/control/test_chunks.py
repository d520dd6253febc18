"""Chunks of a chain: the best by its model, within what the transport takes."""

import pytest
from hypothesis import given, strategies as st

from blitzd.control.chunks import LEAST, MOST, OVERHEAD_S, STEP, chunk_bytes, chunk_of
from blitzd.control.multicast import Chain
from blitzd.control.topology import Device, Topology
from blitzd.fabric.ucx_env import CHUNK_BYTES

MIB = 1 << 20
MB = 10**6


def seconds(size: int, hops: int, rate: int, chunk: int) -> float:
    """T(c) of the module."""
    return (size / chunk + hops - 1) * (chunk / rate + OVERHEAD_S)


def test_the_transport_takes_the_largest() -> None:
    assert MOST == CHUNK_BYTES


@given(
    st.integers(MIB, 400 << 30), st.integers(1, 2000), st.integers(MB, 100_000 * MB)
)  # arena, chain, link
def test_no_other_chunk_is_better_by_a_step(size: int, hops: int, rate: int) -> None:
    best = chunk_bytes(size, hops, rate)
    assert LEAST <= best <= MOST and best % STEP == 0
    took = seconds(size, hops, rate, best)
    for other in (best - STEP, best + STEP, 2 * best, best // 2):
        if LEAST <= other <= MOST:
            # Between two steps either may be nearer to the best.
            assert took <= seconds(size, hops, rate, other) * 1.1


@pytest.mark.parametrize(
    ("size", "hops", "rate", "chunk"),
    [
        (269 * MB, 1, 48 * MB, 1024),  # nothing to fill
        (269 * MB, 6, 48 * MB, 704),
        (33 * MB, 8, 48 * MB, 192),  # an eighth of it: a shard
        (269 * MB, 6, 5 * MB, 256),  # a slow link
        (16 << 30, 1249, 12_500 * MB, 1024),
    ],
)
def test_small_ones_are_for_long_chains_of_few_bytes_over_slow_links(
    size: int, hops: int, rate: int, chunk: int
) -> None:
    assert chunk_bytes(size, hops, rate) == chunk << 10


def test_what_it_gains_by_the_model() -> None:
    """A shard of an eighth of the embedded model down eight machines."""
    size, hops, rate = 33 * MB, 8, 48 * MB
    best = chunk_bytes(size, hops, rate)
    gain = seconds(size, hops, rate, MOST) / seconds(size, hops, rate, best)
    print(f"{best >> 10} KiB instead of {MOST >> 10}: {gain:.2f} times as fast")
    assert gain > 1.1


def test_the_slowest_link_of_a_chain_counts_and_what_it_hangs_onto() -> None:
    rates = {"a": 48, "b": 48, "c": 5}
    made = Topology({n: Device(n, "", r * MB) for n, r in rates.items()}, 10**12)
    chain = Chain("a", ("b", "c"))
    assert chunk_of(made, chain, 269 * MB, 0) == chunk_bytes(269 * MB, 2, 5 * MB)
    assert chunk_of(made, chain, 269 * MB, 4) == chunk_bytes(269 * MB, 6, 5 * MB)
