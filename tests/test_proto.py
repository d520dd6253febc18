"""The generated stubs are those of the committed .proto files."""

import filecmp
from pathlib import Path

from scripts.generate_proto import generate

ROOT = Path(__file__).parent.parent


def test_generated_code_is_not_stale(tmp_path: Path) -> None:
    fresh = tmp_path / "proto"
    generate(fresh)
    committed = ROOT / "blitzd" / "proto"
    files = {p.relative_to(fresh) for p in fresh.rglob("*") if p.is_file()}
    present = {
        p.relative_to(committed)
        for p in committed.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert files == present
    stale = [f for f in files if not filecmp.cmp(fresh / f, committed / f, shallow=False)]
    assert not stale, f"run `make proto`: {stale}"


def test_no_field_hides_a_method_of_the_generated_classes() -> None:
    source = "".join(p.read_text() for p in (ROOT / "proto").rglob("*.proto"))
    words = {line.split("=")[0].split()[-1] for line in source.splitlines() if "=" in line}
    assert not words & {"load", "parse", "dump", "to_dict", "from_dict", "is_set"}
