"""The collective that a sharded load ends with on devices with an arena each."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def gather(backend: str, ranks: int, size: int, directory: Path) -> None:
    order = [sys.executable, "-m", "tests.fabric.gather_ranks", backend]
    done = subprocess.run(
        [*order, str(ranks), str(size), str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ranks", "size"),
    # With a rest; and nothing but one.
    [(3, 1_000_003), pytest.param(2, 100, marks=pytest.mark.slow)],
)
def test_every_rank_has_all_bytes_after_it(ranks: int, size: int, tmp_path: Path) -> None:
    gather("gloo", ranks, size, tmp_path)


@pytest.mark.gpu
def test_the_same_between_gpus_over_nccl(tmp_path: Path) -> None:
    import torch

    devices = torch.cuda.device_count()
    if devices < 2:
        pytest.skip(f"{devices} CUDA devices here; NCCL gathers between two or more")
    gather("nccl", devices, 64 << 20, tmp_path)
