"""`blitzd up --model hf:ORG/REPO`: fetched, prepared, served under its own name; and again with
nobody to ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon
from tests.hf_models import save
from tests.hub_server import Repository, serving


@pytest.fixture
def daemon(state_dir: Path) -> Iterator[Daemon]:
    running = Daemon(state_dir, "--model", "hf:org/tiny-1.5", "--spare", "0", "--kv-mib", "4")
    try:
        yield running
    finally:
        running.end()


def test_a_model_of_the_hub_is_served(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "saved", "llama tied", "40KB")
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    hello = {"model": "org/tiny-1.5", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving() as hub:
        hub.repositories["org/tiny-1.5"] = Repository(files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        daemon.start().ready()
        said = daemon.complete(**hello)["choices"][0]["text"]
        assert sorted(hub.fetched()) == sorted(files)
    assert "fetching hf:org/tiny-1.5" in daemon.output.read_text()
    assert [p.name.split("-float32")[0] for p in (tmp_path / "cache/blitzd/prepared").iterdir()
            if not p.name.startswith(".")] == ["tiny-1.5"]  # fmt: skip
    daemon.kill()
    daemon.start().ready()
    assert daemon.complete(**hello)["choices"][0]["text"] == said
