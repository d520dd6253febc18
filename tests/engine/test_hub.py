"""Models by hf:ORG/REPO, from a server that answers as the hub does, through the command that
people type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from blitzd.engine.hub import HubId, name_of
from tests.hf_models import save
from tests.hub_server import Hub, Repository, commit_of, serving

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Files of one model: in one piece, and in shards."""
    found = {}
    for name, shard in (("one", "5GB"), ("many", "40KB")):
        directory = tmp_path_factory.mktemp("saved") / name
        save(directory, "llama untied", shard)
        found[name] = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert len([name for name in found["many"] if name.endswith(".safetensors")]) > 2
    return found


@pytest.fixture
def hub(saved: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    with serving() as hub:
        hub.repositories["org/one"] = Repository(dict(saved["one"]))
        hub.repositories["org/many-1.5"] = Repository(
            saved["many"]
            | {
                "pytorch_model.bin": b"never",
                "consolidated.safetensors": b"never",
                "README.md": b"never",
                "special_tokens_map.json": b"{}",
            }
        )
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """`blitzd model ...` with a hub and a cache of its own."""

    def blitzd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        home = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(
            [sys.executable, "-m", "blitzd", "model", *arguments],
            env=clean | home | {"HF_ENDPOINT": hub.url} | environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    return blitzd


def pulled(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["path"])


@pytest.mark.parametrize("name", ["one", "many-1.5"])
def test_only_what_is_read_is_fetched_and_once(run: Run, hub: Hub, name: str) -> None:
    directory = pulled(run("pull", f"hf:org/{name}", "--json"))
    files = hub.repositories[f"org/{name}"].files
    here = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert here == {key: files[key] for key in here}
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert wanted <= here.keys()
    assert not here.keys() & {"README.md", "pytorch_model.bin", "consolidated.safetensors"}
    assert sorted(hub.fetched()) == sorted(here), "each once"
    assert directory == pulled(run("pull", f"hf:org/{name}", "--json"))
    assert len(hub.fetched()) == len(here), "and not again"


def test_what_was_pulled_is_a_model_with_its_own_name(run: Run) -> None:
    assert "hf:org/many-1.5 is not all here; fetch it with: blitzd model pull hf:org" in (
        run("inspect", "hf:org/many-1.5").stderr
    )
    pulled(run("pull", "hf:org/many-1.5", "--json"))
    shown = json.loads(run("inspect", "hf:org/many-1.5", "--json", HF_HUB_OFFLINE="1").stdout)
    assert shown["name"] == "many-1.5"
    assert shown["layers"] == 3


def test_a_broken_connection_is_taken_up_where_it_broke(run: Run, hub: Hub) -> None:
    """The client writes 10 MiB at a time, and goes on after the last that it wrote."""
    mib = 1 << 20
    hub.repositories["org/one"].files["model.safetensors"] = os.urandom(35 * mib)
    hub.cut_after["model.safetensors"] = [21 * mib, 11 * mib]
    directory = pulled(run("pull", "hf:org/one", "--json"))
    assert (directory / "model.safetensors").stat().st_size == 35 * mib
    ranges = [r for _, path, r in hub.requests if path == "/cdn/org/one/model.safetensors"]
    assert ranges == ["", f"bytes={20 * mib}-", f"bytes={30 * mib}-"]


def test_shards_that_are_here_are_not_fetched_again(run: Run, hub: Hub) -> None:
    first = "model-00001-of-0000"
    shards = [n for n in hub.repositories["org/many-1.5"].files if n.startswith("model-")]
    broken = sorted(shards)[-1]
    files = hub.repositories["org/many-1.5"].files
    kept = files.pop(broken)
    done = run("pull", "hf:org/many-1.5")
    assert done.returncode == 1
    assert f"model.safetensors.index.json names '{broken}', which is not there" in done.stderr
    files[broken] = kept
    hub.repositories["org/many-1.5"].commit = commit_of(1)
    hub.repositories["org/many-1.5"].said_sha256[broken] = "0" * 64
    done = run("pull", "hf:org/many-1.5")
    assert done.returncode == 1
    assert f"{broken} came with sha256 " in done.stderr
    assert "pull again" in done.stderr
    del hub.repositories["org/many-1.5"].said_sha256[broken]
    before = len(hub.fetched())
    pulled(run("pull", "hf:org/many-1.5", "--json"))
    assert hub.fetched()[before:] == [broken]
    assert [n for n in hub.fetched() if n.startswith(first)] == [
        n for n in shards if n.startswith(first)
    ]


def test_a_revision_is_a_branch_a_tag_or_a_commit(run: Run, hub: Hub) -> None:
    main = pulled(run("pull", "hf:org/one", "--json"))
    assert main.name == commit_of(0)
    assert pulled(run("pull", "hf:org/one@v1", "--json")) == main
    hub.repositories["org/one"].commit = commit_of(1)
    assert pulled(run("pull", "hf:org/one", "--json")).name == commit_of(1), "it moved"
    offline = run("pull", f"hf:org/one@{commit_of(0)}", "--json", HF_HUB_OFFLINE="1")
    assert pulled(offline) == main
    missing = run("pull", "hf:org/one@v2")
    assert missing.returncode == 1
    assert "hf:org/one@v2: no such revision at" in missing.stderr


def test_without_a_network_what_is_here_serves(run: Run, hub: Hub) -> None:
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    failed = run("pull", "hf:org/one", **nobody)
    assert failed.returncode == 1
    assert "hf:org/one: cannot be fetched from http://127.0.0.1:9/org/one: " in failed.stderr
    offline = run("pull", "hf:org/one", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "Traceback" not in offline.stderr
    directory = pulled(run("pull", "hf:org/one", "--json"))
    asked = len(hub.requests)
    assert pulled(run("pull", "hf:org/one", "--json", **nobody)) == directory
    assert pulled(run("pull", "hf:org/one", "--json", HF_HUB_OFFLINE="1")) == directory
    hub.status = 503
    assert pulled(run("pull", "hf:org/one", "--json")) == directory
    assert all(method == "GET" for method, _, _ in hub.requests[asked:])


def test_what_cannot_be_had_says_why_and_what_to_try(run: Run, hub: Hub) -> None:
    def fails(repository: str, message: str) -> None:
        done = run("pull", f"hf:{repository}")
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr
        assert "Traceback" not in done.stderr

    files = hub.repositories["org/one"].files
    hub.repositories["org/gated"] = Repository(files, gated=True)
    fails("org/gated", f"hf:org/gated is gated: accept its terms at {hub.url}/org/gated, then set")
    fails("org/none", f"no such repository at {hub.url}/org/none; if it is private, set HF_TOKEN")
    bare = {name: data for name, data in files.items() if name != "model.safetensors"}
    hub.repositories["org/bin"] = Repository(bare | {"pytorch_model.bin": b"", "x.gguf": b""})
    fails("org/bin", "has no safetensors; it has pytorch_model.bin, x.gguf")
    hub.repositories["org/words"] = Repository(bare)
    fails("org/words", "has no safetensors; and no other weights")
    without = {name: data for name, data in files.items() if name != "tokenizer.json"}
    hub.repositories["org/mute"] = Repository(without)
    fails("org/mute", "hf:org/mute has no tokenizer.json")
    fails("one", "'hf:one' is no model id; hf:ORG/REPO or hf:ORG/REPO@REVISION is")
    fails("org/../one", "is no model id")
    hub.status = 500
    fails("org/words", f"{hub.url}/org/words answered: HfHubHTTPError: Server error '500")


def test_a_model_that_cannot_run_is_refused_before_its_weights_are_fetched(
    run: Run, hub: Hub
) -> None:
    files = dict(hub.repositories["org/one"].files)
    files["config.json"] = files["config.json"].replace(b"LlamaForCausalLM", b"FalconForCausalLM")
    hub.repositories["org/falcon"] = Repository(files)
    done = run("pull", "hf:org/falcon")
    assert done.returncode == 1
    assert "architecture 'FalconForCausalLM'" in done.stderr
    assert "model.safetensors" not in hub.fetched()


def test_a_hostile_repository_is_refused_before_its_weights_are_fetched(run: Run, hub: Hub) -> None:
    files = dict(hub.repositories["org/many-1.5"].files)

    numbers = count(10)

    def fails(message: str, **changes: bytes) -> None:
        commit = commit_of(next(numbers))
        hub.repositories["org/evil"] = Repository(files | changes, commit=commit)
        done = run("pull", "hf:org/evil")
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr

    for name in ("../../../../escape.safetensors", "/etc/passwd", "a/b.safetensors", "*"):
        index = json.dumps({"weight_map": {"x": name}}).encode()
        fails(
            f"names {name!r}, which is not a .safetensors file beside it",
            **{"model.safetensors.index.json": index},
        )
    many = {str(i): f"s{i}.safetensors" for i in range(2000)}
    fails(
        "names 2000 files; at most 1024 are read",
        **{"model.safetensors.index.json": json.dumps({"weight_map": many}).encode()},
    )
    fails("is not JSON", **{"config.json": b"[" * 100_000})
    layers = files["config.json"].replace(
        b'"num_hidden_layers": 3', b'"num_hidden_layers": 2000000000'
    )
    fails("num_hidden_layers is 2000000000", **{"config.json": layers})
    hub.repositories["org/evil"] = Repository(
        files, commit=commit_of(9), unlisted={"tokenizer.json": 1 << 40}
    )
    assert f"tokenizer.json has {1 << 40} bytes" in run("pull", "hf:org/evil").stderr
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
    hub.endless = True
    assert "has more than 10000 files" in run("pull", "hf:org/evil").stderr


def test_ids_are_read_strictly() -> None:
    assert HubId.parse("hf:Qwen/Qwen2.5-0.5B") == HubId("Qwen/Qwen2.5-0.5B", None)
    assert HubId.parse("hf:a/b@refs/pr/4") == HubId("a/b", "refs/pr/4")
    for name in ("hf:", "hf:a", "hf:a/b/c", "hf:a/b@", "hf:../b", "hf:a/b@../c", "hf:a/b c", "a/b"):
        with pytest.raises(ValueError, match="is no model id"):
            HubId.parse(name)


def test_a_directory_of_the_cache_is_called_as_its_repository() -> None:
    assert name_of(Path("hub/models--org--Big-1.5/snapshots/0123abcd")) == "Big-1.5"
    assert name_of(Path("models/Big-1.5")) == "Big-1.5"
