"""`blitzd up --device`, `--weights`: refused when the machine has not what it takes, and told
to the workers when it has."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import BLITZD, Daemon
from tests.tiny import make_tiny

HELLO = {"model": "tiny", "prompt": "Hello", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def daemon(state_dir: Path, model: Path) -> Iterator[Daemon]:
    running = Daemon(state_dir, "--model", str(model), "--spare", "0", "--kv-mib", "4")
    try:
        yield running
    finally:
        running.end()


def maps(daemon: Daemon, model: Path) -> dict[str, bool]:
    """By replica: whether its worker maps the file of weights."""
    return {
        replica["id"]: str(model / "arena.bin") in Path(f"/proc/{replica['pid']}/maps").read_text()
        for replica in daemon.state()["replicas"]
    }


def test_weights_are_held_as_told_and_workers_of_another_choice_are_replaced(
    daemon: Daemon, model: Path
) -> None:
    daemon._args += ("--weights", "copy")
    daemon.start().ready()
    assert maps(daemon, model) == {"r0": False, "r1": False}
    said = daemon.complete(**HELLO)["choices"][0]["text"]
    epochs = {r["id"]: r["epoch"] for r in daemon.state()["replicas"]}
    daemon.kill()
    daemon._args = (*daemon._args[:-1], "map")
    daemon.start().ready()
    assert maps(daemon, model) == {"r0": True, "r1": True}
    assert all(r["epoch"] > epochs[r["id"]] for r in daemon.state()["replicas"])
    again = daemon.complete(**HELLO)["choices"][0]["text"]
    assert again == said


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--device", "tpu"], 2, "device: 'tpu'; accepted: cpu, cuda, cuda:N or auto"),
        (["--device", "cuda"], 1, "device: cuda, but "),
        (["--device", "cuda:1"], 1, "device: cuda:1, but "),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    state_dir: Path, model: Path, options: list[str], status: int, message: str
) -> None:
    if status == 1 and Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a GPU")
    argv = [*BLITZD, "up", "--state-dir", str(state_dir), "--model", str(model), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert message in done.stderr
    assert not (state_dir / "log").exists()
