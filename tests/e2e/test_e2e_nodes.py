"""Two nodes: prefill on one, decode on the other, and what happens when something there dies,
stops or must not join."""

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blitzd.fabric.endpoints import host_and_port
from tests.e2e.daemon import Daemon, wait_for
from tests.e2e.nodes import (
    LEASE_S,
    AgentDaemon,
    Authority,
    controller,
    events_of,
    text_of_one_node,
    until,
)

BODY = {"prompt": "Once upon a time", "max_tokens": 120, "temperature": 0, "ignore_eos": True}


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = Authority(directory / "tls")
        self.a, self.port = controller(directory / "a", self.authority.settings("a"))
        self.b = self.agent("b", self.authority.settings("b"))

    def agent(self, name: str, settings: list[str]) -> AgentDaemon:
        return AgentDaemon(self.directory / name, f"127.0.0.1:{self.port}", settings)

    def worker(self) -> dict[str, Any]:
        """Of node b; empty: there is none."""
        found = [r for r in self.a.state()["replicas"] if r["id"] == "b.r0"]
        return found[0] if found else {}

    def text(self) -> str:
        answer: str = self.a.complete(**BODY)["choices"][0]["text"]
        return answer


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one node that does all by itself."""
    return text_of_one_node(tmp_path_factory.mktemp("alone"), BODY)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    one = Cluster(tmp_path_factory.mktemp("nodes"))
    try:
        one.a.start()
        one.b.start()
        one.a.ready()
        yield one
    finally:
        one.b.end()
        one.a.end()


class Stream:
    """One that runs beside the test."""

    def __init__(self, daemon: Daemon) -> None:
        self.seen: list[dict[str, Any]] = []
        self._client = threading.Thread(target=self._read, args=(daemon,))
        self._client.start()
        wait_for("it decodes", lambda: daemon.state()["requests"]["decoding"] == 1)

    def _read(self, daemon: Daemon) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # its daemon has died
            self.seen.extend(daemon.stream("/v1/completions", BODY))

    def text(self) -> str:
        self._client.join(90)
        assert not self._client.is_alive()
        return "".join(event["choices"][0]["text"] for event in self.seen)


def test_prefill_on_one_node_and_decode_on_the_other_make_the_same_tokens(
    cluster: Cluster, expected: str
) -> None:
    assert cluster.text() == expected
    [spawned] = events_of(cluster.a, "ReplicaRegistered")[1:]
    assert (spawned["payload"]["replica"], spawned["payload"]["node"]) == ("b.r0", "b")
    [agent] = cluster.a.state()["agents"]
    assert (agent["node"], agent["phase"]) == ("b", "present")
    assert cluster.b.workers() == [cluster.worker()["pid"]]
    cluster.a.idle()


def test_a_killed_worker_of_the_other_node_is_replaced_and_its_request_goes_on(
    cluster: Cluster, expected: str
) -> None:
    victim = cluster.worker()
    stream = Stream(cluster.a)
    os.kill(victim["pid"], signal.SIGKILL)
    assert stream.text() == expected
    lost = events_of(cluster.a, "WorkerLost")[-1]["payload"]
    assert (lost["replica"], lost["epoch"]) == ("b.r0", victim["epoch"])
    assert "SIGKILL" in lost["reason"]
    assert cluster.worker()["epoch"] == victim["epoch"] + 1


def test_a_killed_agent_disturbs_nobody_and_comes_back_to_its_workers(
    cluster: Cluster, expected: str
) -> None:
    before, seq = cluster.worker(), cluster.a.state()["seq"]
    stream = Stream(cluster.a)
    assert cluster.b.process is not None
    cluster.b.process.kill()
    cluster.b.process.wait(10)
    killed = time.monotonic()
    cluster.b.start().says('"kept": 1')
    print(f"back in contact after {time.monotonic() - killed:.1f} s")
    assert stream.text() == expected
    time.sleep(1.0)
    after = cluster.worker()
    assert (after["epoch"], after["pid"]) == (before["epoch"], before["pid"])
    since = [e for e in events_of(cluster.a, "NodeLost", "NodeJoined") if e["seq"] > seq]
    assert [e["type"] for e in since] == ["NodeJoined"]


@pytest.mark.slow
def test_a_node_that_freezes_loses_its_lease_and_ends_its_workers_when_it_goes_on(
    cluster: Cluster, expected: str
) -> None:
    before = cluster.worker()
    stream = Stream(cluster.a)
    assert cluster.b.process is not None
    for pid in (cluster.b.process.pid, before["pid"]):
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    until(cluster.a, "the node's loss", lambda state: state["agents"][0]["phase"] == "lost")
    took = time.monotonic() - began
    print(f"lost after {took:.1f} s with a lease of {LEASE_S} s")
    # A beat, five of which are in a lease, may just have come, and was to come.
    assert 0.75 * LEASE_S < took < 2 * LEASE_S
    assert cluster.worker() == {}
    assert f"not heard of for {LEASE_S:g} s" in cluster.a.state()["agents"][0]["trouble"]
    for pid in (before["pid"], cluster.b.process.pid):
        os.kill(pid, signal.SIGCONT)
    until(cluster.a, "its return", lambda state: state["agents"][0]["phase"] == "present")
    wait_for("a worker", lambda: cluster.worker().get("state") == "Decode", 60.0)
    after = cluster.worker()
    assert after["epoch"] > before["epoch"]
    assert cluster.b.workers() == [after["pid"]], "the one of before still runs"
    # What ran there went on where it could: there, once it was back.
    assert stream.text() == expected


def test_a_killed_controller_comes_back_to_its_workers_on_both_nodes(
    cluster: Cluster, expected: str
) -> None:
    """Under load: the streams break with it; clients that ask again are served by the same
    workers, which had nothing to load."""
    before = {r["id"]: (r["pid"], r["epoch"]) for r in cluster.a.state()["replicas"]}
    stream = Stream(cluster.a)
    seq = cluster.a.state()["seq"]
    cluster.a.kill()
    killed = time.monotonic()
    cluster.a.start().ready()
    print(f"ready again {time.monotonic() - killed:.1f} s after the kill")
    assert cluster.text() == expected
    seen = stream.text()
    assert expected.startswith(seen)
    assert len(seen) < len(expected), "it was over before the kill"
    after = {r["id"]: (r["pid"], r["epoch"]) for r in cluster.a.state()["replicas"]}
    assert after == before
    assert cluster.b.workers() == [after["b.r0"][0]]
    since = [e["type"] for e in cluster.a.events() if e["seq"] > seq]
    assert {"NodeAwaited", "WorkerAdopted"} <= set(since)
    assert not {"LoadStarted", "WorkerSpawning", "WorkerLost", "NodeLost"} & set(since)
    cluster.a.idle()


def test_who_has_no_certificate_of_the_authority_does_not_join(cluster: Cluster) -> None:
    ours = cluster.authority.cert
    stranger = Authority(cluster.directory / "other-tls").settings("b")
    trusting = [*stranger, "--set", f"node.tls_ca={ours}"]
    hung_up = "it wants a certificate, node.tls_cert, that the authority"
    said = {
        "stranger": (stranger, "node.tls_ca: self-signed certificate in certificate chain"),
        "trusting": (trusting, hung_up),
        "plain": (["--set", "node.insecure=true"], hung_up),
    }
    agents = {name: cluster.agent(name, settings) for name, (settings, _) in said.items()}
    try:
        for agent in agents.values():
            agent.start()
        for name, (_, why) in said.items():
            agents[name].says(why)
        time.sleep(1.0)
        for agent in agents.values():
            assert "in contact" not in agent.said.replace("out of contact", "")
            assert agent.workers() == []
    finally:
        for agent in agents.values():
            agent.end()
    assert [agent["phase"] for agent in cluster.a.state()["agents"]] == ["present"]


def test_a_worker_of_another_node_talks_to_nobody_without_a_certificate(cluster: Cluster) -> None:
    [known] = json.loads((cluster.b.state_dir / "agent.json").read_text())["workers"]
    host, port = host_and_port(known["endpoint"])
    context = ssl.create_default_context(cafile=str(cluster.authority.cert))
    context.set_alpn_protocols(["h2"])
    words = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    with socket.create_connection((host, port), timeout=5) as plain:
        plain.sendall(words)
        assert _hears_nothing(plain)
    with (
        socket.create_connection((host, port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        assert _hears_nothing(secure)


def _hears_nothing(connection: socket.socket) -> bool:
    """But that it is hung up on, or an alert of TLS."""
    try:
        heard = connection.recv(1)
    except (ConnectionResetError, ssl.SSLError):
        return True
    return heard in (b"", b"\x15")


def test_a_certificate_of_another_node_does_not_do(cluster: Cluster) -> None:
    agent = cluster.agent("thief", cluster.authority.settings("c"))
    try:
        agent.start().says("node.name: b; the certificate is that of 127.0.0.1, c")
    finally:
        agent.end()


def test_an_agent_that_is_told_to_stop_takes_its_leave(cluster: Cluster) -> None:
    assert cluster.b.process is not None
    cluster.b.process.send_signal(signal.SIGTERM)
    assert cluster.b.process.wait(20) == 0
    assert cluster.b.workers() == []
    until(cluster.a, "its leave", lambda state: state["agents"][0]["phase"] == "lost")
    assert cluster.a.state()["agents"][0]["trouble"] == "its agent stops: SIGTERM"
    assert cluster.a.get_status("/ready") == 503


@pytest.mark.slow
def test_a_node_gets_its_weights_from_a_replica_of_the_other(tmp_path: Path, expected: str) -> None:
    authority = Authority(tmp_path / "tls")
    settings = [*authority.settings("a"), "--set", "policy.ladder_map=0"]
    a, port = controller(tmp_path / "a", settings, decode=1)
    b = AgentDaemon(tmp_path / "b", f"127.0.0.1:{port}", authority.settings("b"))
    try:
        a.start().ready()
        b.start()

        def loaded() -> bool:
            ended = [e["payload"] for e in events_of(a, "LoadFinished")]
            return any(payload["replica"] == "b.r0" for payload in ended)

        wait_for("the weights", loaded, 60.0)
        [begun] = [
            e["payload"] for e in events_of(a, "LoadStarted") if e["payload"]["replica"] == "b.r0"
        ]
        assert begun["source"] == "r1"
        # Whoever decodes: then the other one.
        assert a.complete(**BODY)["choices"][0]["text"] == expected
        os.kill(a.replica("decode")["pid"], signal.SIGKILL)
        assert a.complete(**BODY)["choices"][0]["text"] == expected
    finally:
        b.end()
        a.end()
