"""Imports run downhill (design: house rule 5)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "blitzd"

PURE_CORE = ("events", "fsm", "control")
MAY_IMPORT = {
    "events": set(),
    "fsm": {"events"},
    "control": {"events", "fsm"},
    "sched": set(),
    "fabric": set(),
    "engine": {"sched", "fabric", "proto"},
    "node": {"events", "fsm", "control", "sched", "engine", "fabric", "proto"},
    "http": {"node"},
    "sim": {"events", "fsm", "control", "sched"},
    "bench": set(),
}
NO_IO = {"asyncio", "aiohttp", "torch", "grpclib", "anyio", "trio", "socket", "time", "random"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def modules(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    rooms = set(MAY_IMPORT) | {"proto", "cli"}
    for path in modules(room):
        ours = {n.split(".")[1] for n in imported(path) if n.startswith("blitzd.")} & rooms
        uphill = ours - MAY_IMPORT[room] - {room}
        assert not uphill, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(uphill))}"


@pytest.mark.parametrize("room", [*PURE_CORE[1:], "sched"])
def test_the_core_has_no_clock_no_chance_and_no_io(room: str) -> None:
    for path in modules(room):
        impure = {name.split(".")[0] for name in imported(path)} & NO_IO
        assert not impure, f"{path.relative_to(PACKAGE)} imports {', '.join(sorted(impure))}"


def test_the_daemon_does_not_pay_for_torch() -> None:
    """It takes seconds and hundreds of megabytes that only workers need."""
    program = "import blitzd.cli.serve, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
