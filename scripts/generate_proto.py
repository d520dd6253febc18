"""Regenerates `blitzd/proto/` from `proto/`. Run through `make proto`."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(destination: Path) -> None:
    """Writes the generated package for every .proto file to `destination`."""
    sources = sorted((ROOT / "proto").rglob("*.proto"))
    # The compiler formats by the settings that it finds around its working directory and
    # leaves out packages that it finds there, so it works in a directory of its own.
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"--proto_path={ROOT / 'proto'}",
                f"--python_betterproto2_out={scratch}",
                "--python_betterproto2_opt=server_generation=async",
                "--python_betterproto2_opt=client_generation=async",
                *map(str, sources),
            ],
            check=True,
            cwd=scratch,
            stderr=subprocess.PIPE,
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        )
        shutil.rmtree(destination, ignore_errors=True)
        shutil.copytree(scratch, destination)
    destination.chmod(0o755)  # that of `scratch` is for its owner alone


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "blitzd" / "proto")
