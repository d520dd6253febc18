import pytest

from blitzd.sched import BlockManager, NoFreeBlocks
from blitzd.sched.block_manager import chain


def digests(tokens: list[int], size: int) -> list[bytes]:
    found: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        found.append(chain(found[-1] if found else b"", tokens[start : start + size]))
    return found


def test_a_block_is_handed_out_once_until_it_is_released() -> None:
    blocks = BlockManager(8, block_tokens=4)
    first = blocks.take((), 5)
    second = blocks.take((), 3)
    assert sorted(first + second) == list(range(8))
    with pytest.raises(NoFreeBlocks):
        blocks.take((), 1)
    blocks.release(second)
    assert blocks.free == 3
    blocks.audit([first])


def test_a_take_that_does_not_fit_changes_nothing() -> None:
    blocks = BlockManager(4, block_tokens=4)
    held = blocks.take((), 1)
    blocks.publish(held[0], chain(b"", [1, 2, 3, 4]))
    with pytest.raises(NoFreeBlocks):
        blocks.take(held, 4)
    blocks.audit([held])


def test_a_revived_block_is_not_counted_as_free_for_the_rest_of_the_take() -> None:
    blocks = BlockManager(4, block_tokens=4)
    taken = blocks.take((), 4)
    known = digests(list(range(16)), 4)
    for block, digest in zip(taken, known, strict=True):
        blocks.publish(block, digest)
    blocks.release(taken)
    shared = blocks.match(known[:2])
    assert shared == taken[:2]
    with pytest.raises(NoFreeBlocks):
        blocks.take(shared, 3)
    fresh = blocks.take(shared, 2)
    assert set(fresh) == set(taken[2:])
    blocks.audit([shared + fresh])


def test_a_prefix_survives_its_owner_until_the_block_is_needed_and_loses_its_tail_first() -> None:
    blocks = BlockManager(4, block_tokens=4)
    known = digests(list(range(16)), 4)
    taken = blocks.take((), 4)
    for block, digest in zip(taken, known, strict=True):
        blocks.publish(block, digest)
    blocks.release(taken)
    assert blocks.free == 4 and blocks.match(known) == taken
    blocks.take((), 1)
    assert blocks.match(known) == taken[:3]


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    blocks = BlockManager(2, block_tokens=4)
    owner = blocks.take((), 1)
    blocks.publish(owner[0], chain(b"", [1, 2, 3, 4]))
    blocks.take(owner, 0)
    assert blocks.references(owner[0]) == 2
    blocks.release(owner)
    assert blocks.free == 1
    blocks.release(owner)
    assert blocks.free == 2
    with pytest.raises(ValueError, match="more often"):
        blocks.release(owner)


def test_the_digest_of_a_block_depends_on_everything_before_it() -> None:
    one, other = digests([1, 2, 3, 4, 9, 9], 2), digests([1, 2, 3, 5, 9, 9], 2)
    assert one[0] == other[0] and one[1] != other[1] and one[2] != other[2]


def test_equal_blocks_computed_twice_stay_apart_and_one_is_published() -> None:
    blocks = BlockManager(3, block_tokens=4)
    first, second = blocks.take((), 2)
    digest = chain(b"", [1, 2, 3, 4])
    blocks.publish(first, digest)
    blocks.publish(second, digest)
    assert blocks.match([digest]) == [first]
    blocks.release([first])
    blocks.take((), 2)
    assert blocks.match([digest]) == []
    with pytest.raises(AssertionError, match="wrong counts"):
        blocks.audit([])


@pytest.mark.parametrize(("total", "size"), [(0, 64), (4, 0)])
def test_sizes_below_one_are_refused(total: int, size: int) -> None:
    with pytest.raises(ValueError, match="both must be"):
        BlockManager(total, size)
