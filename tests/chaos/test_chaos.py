"""Seeded faults on the unmodified driver in virtual time.

A failing seed is repeated, line by line, by `python -m tests.chaos --seed N --verbose`.
"""

import pytest

from tests.chaos.world import run_seed


@pytest.mark.parametrize("seed", range(42))
def test_seed(seed: int) -> None:
    try:
        run_seed(seed)
    except BaseException:
        print(f"repeat with: python -m tests.chaos --seed {seed} --verbose")
        raise


def test_a_seed_repeats_exactly() -> None:
    first, second = run_seed(7), run_seed(7)
    assert first.disk.records == second.disk.records
    assert first.outcome == second.outcome
