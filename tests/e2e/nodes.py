"""Two nodes on one machine: a controller, an agent, and certificates for both."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.daemon import BLITZD, Daemon, free_port, wait_for, worker_pids

LEASE_S = 20.0
"""An agent that was killed has to be back within it, on a busy machine too."""
OPENSSL = (
    *("openssl", "req", "-x509", "-nodes", "-days", "2"),
    *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
)


class Authority:
    """Of a cluster: signs the certificates of its nodes."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self.cert, self._key = directory / "ca.pem", directory / "ca.key"
        _run(*OPENSSL, "-subj", "/CN=test", "-keyout", self._key, "-out", self.cert)

    def settings(self, node: str, address: str = "127.0.0.1") -> list[str]:
        """Those of a node with a certificate of its own."""
        cert, key = self._directory / f"{node}.pem", self._directory / f"{node}.key"
        _run(
            *(*OPENSSL, "-subj", f"/CN={node}", "-keyout", key, "-out", cert),
            *("-addext", f"subjectAltName=DNS:{node},IP:{address}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", self.cert, "-CAkey", self._key),
        )
        return _set(tls_cert=cert, tls_key=key, tls_ca=self.cert)


def _run(*argv: str | Path) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def _set(section: str = "node", **values: Any) -> list[str]:
    return [word for k, v in values.items() for word in ("--set", f"{section}.{k}={v}")]


def controller(
    state_dir: Path,
    settings: list[str],
    decode: int = 0,
    address: str = "127.0.0.1",
    lease_s: float = LEASE_S,
) -> tuple[Daemon, int]:
    """Prefill is here; and the port that agents join at."""
    port = free_port()
    node = _set(name="a", address=address, port=port, lease_s=lease_s)
    counts = ["--prefill", "1", "--decode", str(decode), "--spare", "0"]
    return Daemon(state_dir, *node, *counts, *settings), port


class AgentDaemon:
    """Offers one replica."""

    def __init__(
        self,
        state_dir: Path,
        controller: str,
        settings: list[str],
        name: str = "b",
        address: str = "127.0.0.1",
        role: str = "decode",
    ) -> None:
        self.state_dir = state_dir
        self.name = name
        self.output = state_dir.parent / f"{state_dir.name}.out"
        self._argv = [*BLITZD, "serve"]
        self._argv += _set(name=name, role="agent", address=address, controller=controller)
        self._argv += _set(state_dir=state_dir)
        offered = {"prefill": 0, "decode": 0, "spare": 0, role: 1}
        self._argv += _set("replicas", **offered) + settings
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "AgentDaemon":
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(self._argv, stdout=output, stderr=output)
        return self

    @property
    def said(self) -> str:
        return self.output.read_text()

    def says(self, text: str, times: int = 1) -> None:
        wait_for(f"{text!r} of the agent", lambda: self.said.count(text) >= times)

    def workers(self) -> list[int]:
        return worker_pids(self.state_dir)

    def end(self) -> None:
        """As when its machine dies: the agent and its workers at once."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for pid in self.workers():
            subprocess.run(["kill", "-9", str(pid)], check=False)


def events_of(daemon: Daemon, *types: str) -> list[dict[str, Any]]:
    return [event for event in daemon.events() if event["type"] in types]


def until(daemon: Daemon, what: str, check: Callable[[dict[str, Any]], bool]) -> None:
    wait_for(what, lambda: check(daemon.state()), 60.0)


def text_of_one_node(directory: Path, body: dict[str, Any]) -> str:
    """What a daemon without agents answers."""
    alone = Daemon(directory / "state", "--spare", "0")
    try:
        alone.start().ready()
        text: str = alone.complete(**body)["choices"][0]["text"]
        return text
    finally:
        alone.end()
