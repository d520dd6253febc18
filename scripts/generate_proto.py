"""Regenerates `blitzd/proto/` from `proto/`. Run through `make proto`."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(destination: Path) -> None:
    """Writes the generated package for every .proto file to `destination`."""
    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    sources = sorted((ROOT / "proto").rglob("*.proto"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--proto_path={ROOT / 'proto'}",
            f"--python_betterproto2_out={destination}",
            "--python_betterproto2_opt=server_generation=async",
            "--python_betterproto2_opt=client_generation=async",
            *map(str, sources),
        ],
        check=True,
        # The compiler leaves out package files that it finds below the working directory.
        cwd=destination,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "blitzd" / "proto")
