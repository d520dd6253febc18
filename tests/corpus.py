"""Logs recorded by earlier versions, with what they fold to (scripts/record_log.py)."""

from pathlib import Path

import msgspec

from blitzd.control.core import CORE_VERSION

LOGS = Path(__file__).parent / "data" / "logs"


def current(name: str) -> Path:
    """That log of this version of the decisions."""
    return LOGS / f"v{CORE_VERSION}-{name}"


def with_faults() -> list[Path]:
    """Logs of this version that chaos made."""
    return sorted(LOGS.glob(f"v{CORE_VERSION}-seed*"))


class Expected(msgspec.Struct, frozen=True):
    core_version: int
    last_seq: int
    hash: str
    hashes: dict[int, str]
    """Of the state on the way there, by sequence: what comes and goes shows in these only."""


def corpus() -> list[Path]:
    return sorted(path.parent for path in LOGS.glob("*/expected.json"))


def expected_of(directory: Path) -> Expected:
    return msgspec.json.decode((directory / "expected.json").read_bytes(), type=Expected)
