"""A controller and its agents, each on a host of its own, as they are started anywhere."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e.daemon import wait_for
from tests.e2e.nodes import AgentDaemon, Authority, controller, events_of
from tests.hosts.netns import Hosts, inside

LEASE_S = 5.0
BODY = {"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
SERVING_S = 90.0


class HostsCluster:
    """Host 0 is node a, which prefills; the others are b, c, ... with one replica each."""

    def __init__(self, hosts: Hosts, directory: Path, roles: tuple[str, ...], *settings: str):
        authority = Authority(directory / "tls")
        self.hosts = hosts
        self.a, port = controller(
            directory / "a",
            [*authority.settings("a", hosts.address(0)), *settings],
            address=hosts.address(0),
            lease_s=LEASE_S,
        )
        self.agents: dict[str, AgentDaemon] = {}
        for number, (name, role) in enumerate(zip("bcde", roles, strict=False), 1):
            self.agents[name] = AgentDaemon(
                directory / name,
                f"{hosts.address(0)}:{port}",
                authority.settings(name, hosts.address(number)),
                name,
                hosts.address(number),
                role,
            )

    def host(self, node: str) -> int:
        return "abcde".index(node)

    def start(self, *nodes: str) -> None:
        for node in nodes:
            with inside(self.hosts.name(self.host(node))):
                self.a.start() if node == "a" else self.agents[node].start()
        wait_for("the controller", self._answers, SERVING_S)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.a.state())
        return False

    def end(self) -> None:
        for agent in self.agents.values():
            agent.end()
        self.a.end()

    def die(self, node: str, how: str) -> None:
        """Its agent and its workers. killed: the connections break. dark: nobody says a word."""
        if how == "dark":
            self.hosts.cut(self.host(node))
        self.agents[node].end()

    def back(self, node: str) -> None:
        self.hosts.mend(self.host(node))
        if self.agents[node].process is not None and self.agents[node].process.poll() is not None:
            self.start(node)

    # What the controller says.

    def replica(self, replica_id: str) -> dict[str, Any]:
        """Empty: it is not there."""
        return next((r for r in self.a.state()["replicas"] if r["id"] == replica_id), {})

    def phase(self, node: str) -> str:
        agents = self.a.state()["agents"]
        return next((str(a["phase"]) for a in agents if a["node"] == node), "")

    def wait_state(self, replica_id: str, state: str) -> None:
        is_so = lambda: self.replica(replica_id).get("state") == state  # noqa: E731
        wait_for(f"{replica_id} {state}", is_so, SERVING_S)

    def since(self, seq: int, *types: str) -> list[dict[str, Any]]:
        return [event for event in events_of(self.a, *types) if event["seq"] > seq]

    def wait_event(self, seq: int, kind: str, fits: Callable[[dict[str, Any]], bool]) -> None:
        def there() -> bool:
            return any(fits(event["payload"]) for event in self.since(seq, kind))

        wait_for(kind, there, SERVING_S)

    def scale(self, prefill: int, decode: int) -> None:
        self.a.admin_post("/admin/scale", {"prefill": prefill, "decode": decode})

    def text(self) -> str:
        answer: str = self.a.complete(**BODY)["choices"][0]["text"]
        return answer


class Streams:
    """Requests that run beside the test, each told by when its tokens came."""

    def __init__(self, cluster: HostsCluster, count: int, every_s: float = 0.0) -> None:
        self.texts: list[str] = [""] * count
        self.errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._read, args=(cluster, number, number * every_s))
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, cluster: HostsCluster, number: int, after_s: float) -> None:
        time.sleep(after_s)
        try:
            for event in cluster.a.stream("/v1/completions", BODY):
                self.texts[number] += event["choices"][0]["text"]
        except Exception as error:
            self.errors.append(error)

    def join(self, timeout_s: float = 120.0) -> list[str]:
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            assert not thread.is_alive(), "a request hangs"
        assert self.errors == []
        return self.texts


@contextlib.contextmanager
def running(
    hosts: Hosts, directory: Path, roles: tuple[str, ...], *settings: str
) -> Iterator[HostsCluster]:
    """The calling thread is on the controller's host meanwhile, to reach it."""
    with inside(hosts.name(0)):
        cluster = HostsCluster(hosts, directory, roles, *settings)
        try:
            yield cluster
        finally:
            cluster.end()
