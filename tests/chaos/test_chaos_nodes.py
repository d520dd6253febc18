"""Seeded faults of nodes, their agents and the controller, on the unmodified driver."""

from collections import Counter

import pytest

from tests.chaos.nodes_world import FAULTS, NodesWorld
from tests.chaos.world import run_seed

QUICK, ALL = 12, 60
FOLLOWS = ("NodeLost", "NodeAwaited", "WorkerAdopted", "RequestResumed", "asked again")

seen: Counter[str] = Counter()


def run(seed: int) -> None:
    try:
        world = run_seed(seed, kind=NodesWorld)
    except BaseException:
        print(f"repeat with: python -m tests.chaos --nodes --seed {seed} --verbose")
        raise
    assert isinstance(world, NodesWorld)
    seen.update(world.did)


@pytest.mark.parametrize("seed", range(QUICK))
def test_seed(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL))
def test_another_seed(seed: int) -> None:
    run(seed)


def test_these_seeds_hold_every_fault_and_what_follows() -> None:
    if not seen:
        pytest.skip("no seed was run")
    assert {what: seen[what] for what in (*FAULTS, *FOLLOWS) if not seen[what]} == {}
