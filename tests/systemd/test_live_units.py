"""The service under a real systemd, hardened, as user blitzd, with a unit per worker.

In the order of the file, on one daemon: each test leaves it serving, the last one stops it.
"""

import json
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.daemon import free_port, wait_for
from tests.gguf_files import tiny_gguf
from tests.systemd.manager import Manager, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := missing()), reason=why or "-"),
]

SERVICE = "blitzd.service"
TOML = """
[node]
spawn = "{spawn}"
[fabric]
same_node = "{same_node}"
[model]
name = "/opt/blitzd/tiny.gguf"
[engine]
kv_mib = 64
pace_layer_ms = 10
[http]
port = {port}
[admin]
port = {admin_port}
"""


class Service:
    def __init__(self, spawn: str = "systemd", same_node: str = "map") -> None:
        self.port, self.admin_port = free_port(), free_port()
        toml = TOML.format(
            port=self.port, admin_port=self.admin_port, spawn=spawn, same_node=same_node
        )
        quick = "WatchdogSec=4\nTimeoutAbortSec=1\n"
        self.manager = Manager(toml, {SERVICE: quick})
        model = self.manager.base / "files/opt/blitzd/tiny.gguf"
        tiny_gguf(model, numbers={"context_length": 2048})

    def start(self) -> None:
        self.manager.start()
        done = self.manager.systemctl("start", SERVICE)
        assert done.returncode == 0, done.stderr + self.manager.log
        self.ready()

    def get(self, url: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            content: bytes = answer.read()
            return content

    def ready(self) -> None:
        def check() -> bool:
            try:
                return bool(self.get(f"http://127.0.0.1:{self.port}/ready"))
            except OSError:
                return False

        wait_for(f"ready; {self.manager.log[-2000:]}", check, 60)

    def complete(self, tokens: int) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        answer: dict[str, Any] = json.loads(self.get(url, body))
        return answer

    def replicas(self) -> dict[str, dict[str, Any]]:
        state = json.loads(self.get(f"http://127.0.0.1:{self.admin_port}/admin/state"))
        return {replica["id"]: replica for replica in state["replicas"]}

    def events(self, kind: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.admin_port}/admin/events?since=0&limit=100000"
        records = [json.loads(line) for line in self.get(url).splitlines()]
        return [record["payload"] for record in records if record["type"] == kind]

    def units(self) -> set[str]:
        listed = self.manager.systemctl("list-units", "--plain", "--no-legend", "blitzd-worker@*")
        return {line.split()[0] for line in listed.stdout.splitlines()}

    def pid(self, unit: str = SERVICE) -> str:
        return self.manager.show(unit, "MainPID")

    def signal(self, name: str, pid: str | int) -> None:
        done = self.manager.run("kill", f"-{name}", str(pid))
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    one = Service()
    try:
        one.start()
        yield one
    finally:
        one.manager.close()


def test_it_serves_as_its_own_user_with_a_unit_for_each_worker(service: Service) -> None:
    assert len(service.complete(4)["choices"]) == 1
    status = "1 prefill, 1 decode, 1 spare; 0 requests"
    wait_for("status", lambda: service.manager.show(SERVICE, "StatusText").startswith(status))
    assert not service.events("WorkerLost")
    replicas = service.replicas()
    assert service.units() == {f"blitzd-worker@{i}-1.service" for i in replicas}
    for replica in replicas.values():
        unit = f"blitzd-worker@{replica['id']}-1.service"
        assert service.pid(unit) == str(replica["pid"])
        assert unit in service.manager.run("cat", f"/proc/{replica['pid']}/cgroup").stdout
        score = service.manager.run("cat", f"/proc/{replica['pid']}/oom_score_adj").stdout
        owner = service.manager.run("stat", "-c", "%U", f"/proc/{replica['pid']}").stdout
        assert (score.strip(), owner.strip()) == ("500", "blitzd")
    score = service.manager.run("cat", f"/proc/{service.pid()}/oom_score_adj").stdout
    assert int(score) in (-100, 0), "0 where nobody may lower it (CAP_SYS_RESOURCE)"


@pytest.mark.parametrize(
    ("signal", "reason"),
    [("KILL", "killed by SIGKILL"), ("STOP", "killed by SIGKILL (silent for 5 s")],
)
def test_a_lost_worker_is_a_new_unit_with_the_reason_in_the_log(
    service: Service, signal: str, reason: str
) -> None:
    victim = service.replicas()["r1"]
    before = len(service.events("WorkerLost"))
    service.signal(signal, victim["pid"])
    wait_for("the loss", lambda: len(service.events("WorkerLost")) > before)
    lost = service.events("WorkerLost")[-1]
    assert (lost["replica"], lost["epoch"]) == ("r1", victim["epoch"])
    assert lost["reason"].startswith(reason)
    service.ready()
    assert len(service.complete(4)["choices"]) == 1
    epoch = service.replicas()["r1"]["epoch"]
    assert epoch == victim["epoch"] + 1
    # No unit that failed is left behind.
    wait_for("forgotten", lambda: len(service.units()) == 3)
    assert f"blitzd-worker@r1-{epoch}.service" in service.units()


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_workers_outlive_a_daemon_that_is_killed_or_stuck(service: Service, signal: str) -> None:
    """A stuck one is found by the watchdog."""
    workers = {i: (r["pid"], r["epoch"]) for i, r in service.replicas().items()}
    before = service.pid()
    restarts = int(service.manager.show(SERVICE, "NRestarts"))
    service.signal(signal, before)
    wait_for("a restart", lambda: service.pid() not in (before, "0"), 30)
    service.ready()
    assert int(service.manager.show(SERVICE, "NRestarts")) == restarts + 1
    assert {i: (r["pid"], r["epoch"]) for i, r in service.replicas().items()} == workers
    assert len(service.complete(4)["choices"]) == 1


def as_blitzd(service: Service, *argv: str) -> subprocess.CompletedProcess[str]:
    return service.manager.run("runuser", "-u", "blitzd", "--", *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("systemctl", "--no-ask-password", "stop", SERVICE),
        ("systemctl", "--no-ask-password", "start", "polkit.service"),
        ("systemctl", "--no-ask-password", "stop", "blitzd-worker@r0-1.service"),
        ("systemd-run", "--no-ask-password", "--unit=blitzd-worker@x.service", "true"),
        ("systemd-run", "--no-ask-password", "true"),
    ],
)
def test_the_service_user_may_start_its_workers_and_nothing_else(
    service: Service, argv: tuple[str, ...]
) -> None:
    refused = as_blitzd(service, *argv)
    assert refused.returncode != 0
    assert re.search("authentication required|Access denied", refused.stderr), refused.stderr


def test_stop_waits_for_what_runs_and_leaves_no_worker(service: Service) -> None:
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.append(service.complete(200)))
    client.start()
    wait_for("it", lambda: "1 request" in service.manager.show(SERVICE, "StatusText"))
    done = service.manager.systemctl("stop", SERVICE)
    client.join(30)
    assert done.returncode == 0
    assert answers[0]["usage"]["completion_tokens"] == 200
    assert service.manager.show(SERVICE, "Result") == "success"
    assert service.units() == set()


def test_wrong_settings_are_not_tried_again(service: Service) -> None:
    path = "/etc/blitzd/blitzd.toml"
    service.manager.run("sed", "-i", "s/kv_mib = 64/kv_mib = 0/", path)
    assert service.manager.systemctl("start", SERVICE).returncode != 0
    assert service.manager.show(SERVICE, "ActiveState") == "failed"
    assert service.manager.show(SERVICE, "NRestarts") == "0"
    assert "engine.kv_mib: 0; accepted: an integer from 1" in service.manager.log


@pytest.mark.parametrize(("spawn", "same_node"), [("process", "map"), ("systemd", "ucx")])
def test_other_ways_to_start_workers_and_to_move_kv_work_in_the_sandbox_too(
    spawn: str, same_node: str
) -> None:
    service = Service(spawn, same_node)
    try:
        service.start()
        assert service.complete(4)["usage"]["completion_tokens"] == 4
        assert service.events("MigrationFinished"), "the KV went to the decode replica"
        workers = {i: (r["pid"], r["epoch"]) for i, r in service.replicas().items()}
        before = service.pid()
        service.signal("KILL", before)
        wait_for("a restart", lambda: service.pid() not in (before, "0"), 30)
        service.ready()
        assert {i: (r["pid"], r["epoch"]) for i, r in service.replicas().items()} == workers
        assert service.manager.systemctl("stop", SERVICE).returncode == 0
        assert "blitzd worker" not in service.manager.run("ps", "ax", "-o", "args").stdout
    finally:
        service.manager.close()
