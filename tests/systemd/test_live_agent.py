"""An agent under a real systemd, with a unit for each worker: they outlive the agent, and the
controller on the other side."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import Daemon, free_port, wait_for
from tests.gguf_files import tiny_gguf
from tests.systemd.manager import Manager, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := missing()), reason=why or "-"),
]

SERVICE = "blitzd.service"
UNIT = "blitzd-worker@b.r0-1.service"
LEASE_S = 30
TOML = """
[node]
name = "b"
role = "agent"
address = "127.0.0.1"
controller = "127.0.0.1:{port}"
insecure = true
spawn = "systemd"
[model]
name = "/opt/blitzd/tiny.gguf"
[engine]
kv_mib = 64
pace_layer_ms = 10
[replicas]
prefill = 0
decode = 1
spare = 0
"""


class Pair:
    def __init__(self, directory: Path) -> None:
        port = free_port()
        self.agent = Manager(TOML.format(port=port), {SERVICE: "RestartSec=100ms\n"})
        model = self.agent.base / "files/opt/blitzd/tiny.gguf"
        tiny_gguf(model, numbers={"context_length": 2048})
        # Under its own name, which is the model's.
        mine = Path(shutil.copy(model, directory / "tiny.gguf"))
        settings = {
            "node.name": "a",
            "node.address": "127.0.0.1",
            "node.port": port,
            "node.insecure": "true",
            "node.lease_s": LEASE_S,
            "model.name": mine,
            "engine.kv_mib": 64,
            "engine.pace_layer_ms": 10,
        }
        words = [w for key, value in settings.items() for w in ("--set", f"{key}={value}")]
        counts = ("--prefill", "1", "--decode", "0", "--spare", "0")
        self.controller = Daemon(directory / "a", *words, *counts)

    def start(self) -> None:
        self.controller.start()
        self.agent.start()
        done = self.agent.systemctl("start", SERVICE)
        assert done.returncode == 0, done.stderr + self.agent.log
        self.controller.ready()

    def worker(self) -> dict[str, Any]:
        replicas = self.controller.state()["replicas"]
        found: dict[str, Any] = next((r for r in replicas if r["id"] == "b.r0"), {})
        return found

    def text(self) -> str:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 20, "temperature": 0}
        answer = self.controller.post("/v1/completions", {**body, "ignore_eos": True})
        return str(answer["choices"][0]["text"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    one = Pair(tmp_path_factory.mktemp("pair"))
    try:
        one.start()
        yield one
    finally:
        with contextlib.suppress(Exception):
            one.agent.close()
        one.controller.end()


def test_its_worker_is_a_unit_of_its_own(pair: Pair) -> None:
    assert pair.text()
    assert pair.agent.show(UNIT, "MainPID") == str(pair.worker()["pid"])


def test_the_worker_outlives_its_agent_which_finds_it(pair: Pair) -> None:
    before, text = pair.worker(), pair.text()
    agent = pair.agent.show(SERVICE, "MainPID")
    done = pair.agent.run("kill", "-KILL", agent)
    assert done.returncode == 0, done.stderr
    wait_for("another agent", lambda: pair.controller.state()["agents"][0]["epoch"] == 2, LEASE_S)
    after = pair.worker()
    assert (after["pid"], after["epoch"]) == (before["pid"], before["epoch"])
    assert pair.agent.show(UNIT, "MainPID") == str(before["pid"])
    assert pair.text() == text


def test_the_worker_outlives_its_controller_which_adopts_it(pair: Pair) -> None:
    before, text = pair.worker(), pair.text()
    pair.controller.kill()
    pair.controller.start().ready()
    after = pair.worker()
    assert (after["pid"], after["epoch"]) == (before["pid"], before["epoch"])
    assert pair.text() == text
    # Found again, it is watched as before: its death is known, with the reason.
    done = pair.agent.run("kill", "-KILL", str(before["pid"]))
    assert done.returncode == 0, done.stderr
    wait_for("the next one", lambda: pair.worker().get("epoch") == before["epoch"] + 1)
    [lost] = [e["payload"] for e in pair.controller.events() if e["type"] == "WorkerLost"]
    assert (lost["replica"], "SIGKILL" in lost["reason"]) == ("b.r0", True)
