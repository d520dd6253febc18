"""What is there of an arena, against the plainest model of it: an owner a byte."""

import itertools

import pytest
from hypothesis import given, strategies as st

from blitzd.engine.coverage import Coverage, shards

SIZE = 24
ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: tuple(sorted(pair)))
changes = st.lists(st.tuples(ranges, st.sampled_from(["a", "b", ""])), max_size=12)


@given(changes, ranges)
def test_it_knows_every_byte_and_who_brought_it(changes, asked) -> None:
    """Without an owner: discarded."""
    coverage, plain = Coverage(), [""] * SIZE
    for (start, end), owner in changes:
        if owner:
            coverage.add(start, end, owner)
        else:
            coverage.discard(start, end)
        plain[start:end] = [owner] * (end - start)
    start, end = asked
    gaps = [byte for s, e in coverage.missing(start, end) for byte in range(s, e)]
    assert gaps == [byte for byte in range(start, end) if not plain[byte]]
    assert coverage.owners(start, end) == set(plain[start:end]) - {""}
    assert coverage.total() == sum(map(bool, plain))
    there = 0
    while start + there < SIZE and plain[start + there]:
        there += 1
    assert coverage.reach(start) == start + there


def test_what_grows_stays_one_run() -> None:
    """As a transfer tells of itself: each time from its beginning."""
    coverage = Coverage()
    for end in range(1, 1000):
        coverage.add(0, end, "a")
    assert (coverage.reach(0), len(coverage._runs)) == (999, 1)


@given(st.integers(0, 10**6), st.integers(1, 16), st.sampled_from([1, 64, 4096]))
def test_shards_are_all_of_it_and_of_one_length_but_for_the_last(size, count, alignment) -> None:
    cut = shards(size, count, alignment)
    assert len(cut) == count and (cut[0][0], cut[-1][1]) == (0, size)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(cut))
    assert all(start % alignment == 0 for start, _ in cut)
    *others, last = [end - start for start, end in cut]
    assert len(set(others)) <= 1
    assert all(0 <= last - length < count * alignment for length in others)


@pytest.mark.parametrize(
    ("size", "count", "cut"),
    [
        (256, 2, [(0, 128), (128, 256)]),
        (200, 3, [(0, 64), (64, 128), (128, 200)]),
        (10, 2, [(0, 0), (0, 10)]),
    ],
)
def test_where_the_cuts_are(size, count, cut) -> None:
    assert shards(size, count, 64) == cut
