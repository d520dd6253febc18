"""A real daemon with real workers, started as a person starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BLITZD = [sys.executable, "-m", "blitzd"]
READY_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(what: str, check: Callable[[], bool], timeout_s: float = 30.0) -> float:
    """Seconds it took."""
    started = time.monotonic()
    while not check():
        if time.monotonic() - started > timeout_s:
            raise AssertionError(f"{what}: not within {timeout_s} s")
        time.sleep(0.01)
    return time.monotonic() - started


class Daemon:
    def __init__(self, state_dir: Path, *args: str, tree: Path | None = None) -> None:
        """`tree`: a checkout whose code is to run in place of this one's."""
        self.state_dir = state_dir
        self.port, self.admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = state_dir.parent / f"{state_dir.name}.out"
        self._args = args
        self._tree = tree
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Daemon":
        argv = [*BLITZD, "up", "--state-dir", str(self.state_dir)]
        argv += ["--port", str(self.port), "--admin-port", str(self.admin_port), *self._args]
        environ = {**os.environ, "PYTHONPATH": str(self._tree)} if self._tree else None
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                argv, stdout=output, stderr=output, cwd=self._tree, env=environ
            )
        return self

    def ready(self) -> float:
        """Waits until it serves; seconds it took."""

        def check() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.output.read_text()
            return self.get_status("/ready") == 200

        return wait_for("ready", check, READY_S)

    def get_status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def admin(self, path: str) -> Any:
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def admin_post(self, path: str, body: dict[str, Any]) -> Any:
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def state(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.admin("/admin/state")
        return shown

    def replica(self, role: str) -> dict[str, Any]:
        found: dict[str, Any] = next(r for r in self.state()["replicas"] if r["role"] == role)
        return found

    def events(self) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self.admin_port}/admin/events?since=0&limit=100000"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return [json.loads(line) for line in answer if line.strip()]

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", {"model": "smollm2-135m", **body})

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> dict[str, Any]:
        """Raises urllib.error.HTTPError for an error status."""
        with self.open(path, body, timeout_s) as answer:
            parsed: dict[str, Any] = json.load(answer)
            return parsed

    def open(self, path: str, body: dict[str, Any], timeout_s: float = 120.0) -> Any:
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=timeout_s)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, `[DONE]` left out."""
        with self.open(path, {"model": "smollm2-135m", "stream": True, **body}) as answer:
            for line in answer:
                text = line.decode().rstrip("\n")
                if text.startswith("data: ") and text != "data: [DONE]":
                    yield json.loads(text[len("data: ") :])

    def idle(self) -> dict[str, Any]:
        """The state once nothing runs, which must hold nothing."""

        def check() -> bool:
            replicas = self.state()["replicas"]
            return all(r["inflight"] == r["blocks_used"] == 0 for r in replicas)

        wait_for("idle", check)
        return self.state()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self, timeout_s: float = 40.0) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """Whatever state it is in, nothing of it stays."""
        if self.process is not None and self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
        for pid in worker_pids(self.state_dir):
            os.kill(pid, signal.SIGKILL)


def worker_pids(state_dir: Path) -> list[int]:
    """Workers of this daemon, by the runtime directory that their sockets are in."""
    from blitzd.node.paths import runtime_dir

    mark = str(runtime_dir(state_dir)).encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark in argv and b"\0worker\0" in argv:
                pids.append(int(entry.name))
    return pids


def blitzd_json(*args: str) -> Any:
    done = subprocess.run([*BLITZD, *args, "--json"], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()
    return json.loads(done.stdout)
