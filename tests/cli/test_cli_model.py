"""`blitzd model`: exit codes, and output that programs can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.gguf_files import tiny_gguf
from tests.tiny import make_tiny


def blitzd(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = "from blitzd.cli import main; main()"
    command = [sys.executable, "-c", program, "model", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_inspect_describes_every_kind_of_model(tmp_path: Path) -> None:
    found = blitzd("inspect", tiny_gguf(tmp_path / "x.gguf"), "--json")
    assert found.returncode == 0
    document = json.loads(found.stdout)
    assert document["layers"] == 2
    assert document["tensor_types"] == {"F32": 20}
    prepared = json.loads(blitzd("inspect", make_tiny(tmp_path / "tiny"), "--json").stdout)
    assert prepared["heads"] == 6
    assert len(prepared["digest"]) == 32


def test_a_name_is_shown_as_it_is(tmp_path: Path) -> None:
    """Neither markup, which may not even close, nor a terminal's commands."""
    path = tiny_gguf(tmp_path / "x.gguf", texts={"general.name": "[/b] [red]x \x1b[31my\n"})
    found = blitzd("inspect", path)
    assert (found.returncode, found.stderr) == (0, "")
    assert "[/b] [red]x \ufffd[31my\ufffd" in found.stdout


def test_what_fails_says_so_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no model at all, just text")
    for model, message in [(tmp_path / "x.gguf", "not a GGUF"), ("nowhere", "no model 'nowhere'")]:
        failed = blitzd("inspect", model)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert message in failed.stderr
    assert blitzd("pull", "nothing-of-the-sort").returncode == 1


def test_list_is_json_with_the_embedded_model() -> None:
    rows = json.loads(blitzd("list", "--json").stdout)
    assert "smollm2-135m" in {row["name"] for row in rows}
