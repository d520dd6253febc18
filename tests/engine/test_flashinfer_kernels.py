"""FlashInfer's modules that the back end loads, compiled ahead of time where there is no
device: a machine with GPUs but no compiler can be given the results."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blitzd.engine.device import DTYPES, HEAD_DIMS

CUDA_HOMES = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")

PROGRAM = Path(__file__).resolve().parents[2] / "scripts/compile_flashinfer.py"


def cuda_home() -> Path | None:
    return next((Path(p) for p in CUDA_HOMES if p and Path(p, "bin/nvcc").exists()), None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("arch", ["8.0", "9.0a"])
def test_modules_compile_for_a100_and_h100(tmp_path: Path, arch: str, kind: str) -> None:
    pytest.importorskip("flashinfer", reason="flashinfer is not installed (blitzd[cuda])")
    home = cuda_home()
    if home is None or shutil.which("gcc") is None:
        pytest.skip("nvcc or gcc is not installed")
    # The toolkit has no stand-in for the driver's library, and the linker wants one.
    stub = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(tmp_path / "libcuda.so")]
    subprocess.run([*stub, "-x", "c", "/dev/null"], check=True, timeout=60)
    environment = os.environ | {
        "CUDA_HOME": str(home.resolve()),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        "LIBRARY_PATH": str(tmp_path),
        "MAX_JOBS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    built = subprocess.run(
        ["nice", "-n", "15", sys.executable, str(PROGRAM), kind, DTYPES[0], str(HEAD_DIMS[0])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-4000:]
    library = Path(built.stdout.split()[-1])
    with library.open("rb") as handle:
        assert handle.read(4) == b"\x7fELF"
