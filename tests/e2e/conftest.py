from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon


@pytest.fixture(scope="module", params=["map", "ucx"])
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """One that serves the embedded model, for tests that leave it as it was."""
    state_dir = tmp_path_factory.mktemp("node") / "state"
    running = Daemon(state_dir, "--same-node", request.param).start()
    try:
        running.ready()
        yield running
    finally:
        running.end()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"
