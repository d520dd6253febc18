"""What tests of several rooms start from."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine.workers import Zygote


@pytest.fixture(scope="module")
def zygotes(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Zygote]":
    """Starts workers as processes, without importing everything anew for each."""
    from tests.engine.workers import zygote  # here, since it takes torch

    with zygote(tmp_path_factory.mktemp("run")) as one:
        yield one


@pytest.fixture(scope="module")
def hollow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module's model without its weights: what a target has on its disk."""
    directory = tmp_path_factory.mktemp("hollow") / model.name
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("arena.bin"))
    return directory
