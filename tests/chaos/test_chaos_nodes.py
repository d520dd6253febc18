"""Seeded faults of nodes, their agents and the controller, on the unmodified driver."""

import pytest

from tests.chaos.nodes_world import NodesWorld
from tests.chaos.world import run_seed

SEEDS = 25


@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int) -> None:
    try:
        run_seed(seed, kind=NodesWorld)
    except BaseException:
        print(f"repeat with: python -m tests.chaos --nodes --seed {seed} --verbose")
        raise
