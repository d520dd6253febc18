"""The service manager's protocol, over real datagram sockets."""

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from blitzd.control import commands as cmd
from blitzd.control.core import CORE_VERSION
from blitzd.events import types as ev
from blitzd.node.config import NodeConfig
from blitzd.node.daemon import NodeDaemon
from blitzd.node.live import LiveRequest
from blitzd.node.notify import Manager
from tests.e2e.daemon import BLITZD, free_port, wait_for
from tests.gguf_files import tiny_gguf
from tests.tiny import make_tiny


class Listener:
    """The manager's end. Each datagram is kept with the time at which it came."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.got: list[tuple[float, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.settimeout(0.05)
        self._open = True
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while self._open:
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                continue
            self.got += [(time.monotonic(), line) for line in data.decode().split("\n")]

    def lines(self, start: str = "", since: float = 0.0) -> list[str]:
        return [line for at, line in self.got if line.startswith(start) and at >= since]

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    path = str(tmp_path / "notify")
    one = Listener(path if request.param == "path" else f"@blitzd-test-{os.getpid()}")
    yield one
    one.close()


def test_lines_arrive_as_one_datagram(listener: Listener) -> None:
    manager = Manager.of({"NOTIFY_SOCKET": listener.address})
    manager.tell("READY=1", "STATUS=two words")
    wait_for("both", lambda: len(listener.got) == 2)
    assert listener.lines() == ["READY=1", "STATUS=two words"]
    assert listener.got[0][0] == pytest.approx(listener.got[1][0], abs=0.01)


def test_the_environment_is_taken_and_not_left_to_children() -> None:
    variables = {
        "NOTIFY_SOCKET": "/x",
        "WATCHDOG_USEC": "3000000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    environment = {**variables, "PATH": "/bin"}
    assert Manager.of(environment) == Manager("/x", 3.0)
    assert environment == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Manager(None, None)),
        ({"NOTIFY_SOCKET": "relative"}, Manager(None, None)),
        ({"NOTIFY_SOCKET": "@"}, Manager(None, None)),
        ({"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "0"}, Manager("@a", None)),
        ({"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "soon"}, Manager("@a", None)),
        ({"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "5000000"}, Manager("@a", 5.0)),
        # Meant for another process.
        (
            {"NOTIFY_SOCKET": "@a", "WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"},
            Manager("@a", None),
        ),
    ],
)
def test_what_is_not_a_manager_is_none(environment: dict[str, str], expected: Manager) -> None:
    assert Manager.of(environment) == expected


def test_a_manager_that_is_gone_does_not_stop_the_daemon(tmp_path: Path) -> None:
    Manager(str(tmp_path / "nobody"), None).tell("READY=1")


class NoWorkers:
    def perform(self, command: cmd.Command, live: LiveRequest | None) -> None:
        pass


def test_a_stuck_driver_stops_the_pings_though_the_event_loop_runs(tmp_path: Path) -> None:
    listener = Listener(str(tmp_path / "notify"))
    manager = Manager(listener.address, 1.0)

    async def stuck() -> None:
        (tmp_path / "state").mkdir()
        model = make_tiny(tmp_path / "model")
        daemon = NodeDaemon(NodeConfig(tmp_path / "state", model, "tiny"))
        boot = ev.Booted(1, "0", "local", (("r0", "prefill"),), (), CORE_VERSION, ())
        driving = asyncio.create_task(daemon.driver.run(NoWorkers(), boot))
        attending = asyncio.create_task(manager.attend(daemon))
        await asyncio.sleep(2.5)
        healthy = len(listener.lines("WATCHDOG=1"))
        assert healthy >= 3, "an idle driver turns twice a second"

        async def never() -> None:
            await asyncio.Event().wait()

        # As on a disk that does not answer: the next record that must be on it waits for it.
        daemon.driver._journal.sync = never  # type: ignore[method-assign]
        await daemon.driver.post(ev.StopRequested("test", 0))
        await asyncio.sleep(0.5)
        before = len(listener.lines("WATCHDOG=1"))
        await asyncio.sleep(2.5)
        assert len(listener.lines("WATCHDOG=1")) == before
        for task in (driving, attending):
            task.cancel()
        await asyncio.gather(driving, attending, return_exceptions=True)

    try:
        asyncio.run(stuck())
    finally:
        listener.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Listener, str]]:
    listener = Listener(str(tmp_path / "notify"))
    port = free_port()
    settings = {
        "node.state_dir": tmp_path / "state",
        "model.name": tiny_gguf(tmp_path / "tiny.gguf", numbers={"context_length": 2048}),
        "engine.kv_mib": 64,
        "engine.pace_layer_ms": 10,
        "replicas.spare": 0,
        "http.port": port,
        "admin.port": 0,
    }
    argv = [*BLITZD, "serve"]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    environment = os.environ | {
        "NOTIFY_SOCKET": listener.address,
        "WATCHDOG_USEC": "2000000",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    process = subprocess.Popen(argv, env=environment)
    yield process, listener, f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()
    listener.close()


def get(url: str, body: bytes | None = None) -> Any:
    headers = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60)


def test_the_life_of_a_daemon_as_its_manager_sees_it(
    served: tuple[subprocess.Popen[bytes], Listener, str],
) -> None:
    process, listener, url = served

    def came(line: str) -> Callable[[], bool]:
        return lambda: bool(listener.lines(line))

    wait_for("READY", came("READY=1"), 60)
    # It listens from then on. That it serves is another question, with a route of its own.
    assert get(f"{url}/live").status == 200
    wait_for("replicas", came("STATUS=1 prefill, 1 decode; 0 requests"), 60)
    assert listener.lines("STATUS=model tiny")
    assert not listener.lines("EXTEND") and not listener.lines("STOPPING")

    since = time.monotonic()
    body = b'{"model":"tiny","prompt":"a","max_tokens":150,"ignore_eos":true}'
    answers: list[bytes] = []
    client = threading.Thread(
        target=lambda: answers.append(get(f"{url}/v1/completions", body).read())
    )
    client.start()
    wait_for("the request", came("STATUS=1 prefill, 1 decode; 1 request"), 20)
    process.send_signal(signal.SIGTERM)
    wait_for("its end", lambda: process.poll() is not None, 30)
    client.join()
    assert process.returncode == 0
    assert b'"completion_tokens":150' in answers[0]
    assert listener.lines("STOPPING=1")
    assert listener.lines("EXTEND_TIMEOUT_USEC=20000000")
    assert listener.lines("STATUS=draining: 1 prefill, 1 decode; 1 request")
    pings = [at for at, line in listener.got if line == "WATCHDOG=1" and at > since]
    gaps = [b - a for a, b in pairwise(pings)]
    assert max(gaps) < 2.0, f"the manager would have ended it: {gaps}"


def test_a_second_signal_ends_the_drain(
    served: tuple[subprocess.Popen[bytes], Listener, str],
) -> None:
    process, listener, url = served
    wait_for("replicas", lambda: bool(listener.lines("STATUS=1 prefill, 1 decode; 0")), 60)
    body = b'{"model":"tiny","prompt":"a","max_tokens":2000,"ignore_eos":true,"stream":true}'
    with get(f"{url}/v1/completions", body) as answer:
        assert answer.readline().startswith(b"data: {")
        process.send_signal(signal.SIGTERM)
        wait_for("draining", lambda: bool(listener.lines("STATUS=draining")), 10)
        assert answer.readline() == b"\n"
        assert answer.readline().startswith(b"data: {"), "what runs goes on"
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = answer.read()
    process.wait(20)
    assert time.monotonic() - began < 10, "the deadline was 30 s"
    assert process.returncode == 0
    assert b'"error"' in rest.splitlines()[-2] + rest.splitlines()[-3]
