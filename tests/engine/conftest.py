"""What the engine's tests start from, if they say nothing else."""

from pathlib import Path

import pytest

from tests.tiny import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", "float64")
