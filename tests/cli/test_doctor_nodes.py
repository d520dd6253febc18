"""What the doctor finds where there are other nodes."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blitzd.cli.doctor_checks import Finding, Machine
from blitzd.cli.doctor_nodes import nodes
from blitzd.cli.settings_layers import load
from blitzd.fabric.endpoints import Tls
from tests.e2e.daemon import free_port
from tests.e2e.nodes import Authority


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours") / "tls")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs") / "tls")


def findings(*settings: str) -> dict[str, Finding]:
    """Of node b, an agent, with these as on a command line."""
    agent = ("node.name=b", "node.role=agent", "node.address=127.0.0.1")
    given = [word for word in settings if word != "--set"]
    machine = Machine.of(load(None, [*agent, *given], {}).settings)
    return {finding.name: finding for finding in nodes(machine)}


def tls(settings: list[str]) -> Tls:
    return Tls(*(word.split("=")[1] for word in settings if word != "--set"))


@contextlib.contextmanager
def controller(context: ssl.SSLContext | None) -> Iterator[str]:
    """Says one word to whoever it accepts; without a context it hangs up."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with contextlib.suppress(OSError), connection:
                    if context is None:
                        continue
                    with context.wrap_socket(connection, server_side=True) as secure:
                        secure.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"node.controller=127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def test_one_node_alone_has_nothing_to_check() -> None:
    assert list(nodes(Machine.of(load(None, (), {}).settings))) == []


def test_an_agent_whose_controller_takes_it(ours: Authority) -> None:
    with controller(tls(ours.settings("a")).server) as at:
        found = findings(at, *ours.settings("b"))
    assert {name: f.status for name, f in found.items()} == {
        "node.address": "ok",
        "certificate": "ok",
        "controller": "ok",
    }


def test_a_certificate_that_names_another_node(ours: Authority) -> None:
    with controller(tls(ours.settings("a")).server) as at:
        found = findings(at, *ours.settings("c"))
    assert found["certificate"].status == "fail"
    assert "not valid for 'b'" in found["certificate"].found


def test_a_certificate_and_a_key_that_do_not_belong_together(ours: Authority) -> None:
    key = next(w for w in ours.settings("c") if w.startswith("node.tls_key"))
    found = findings(f"node.controller=127.0.0.1:{free_port()}", *ours.settings("b"), key)
    assert found["certificate"].status == "fail"
    assert "KEY_VALUES_MISMATCH" in found["certificate"].found


def test_a_controller_of_another_authority(ours: Authority, theirs: Authority) -> None:
    with controller(tls(theirs.settings("a")).server) as at:
        found = findings(at, *ours.settings("b"))
    assert (found["certificate"].status, found["controller"].status) == ("ok", "fail")
    assert "self-signed certificate" in found["controller"].found
    assert "node.tls_ca" in found["controller"].fix


def test_a_controller_that_does_not_accept_our_certificate(
    ours: Authority, theirs: Authority
) -> None:
    trusting = f"node.tls_ca={ours.cert}"
    with controller(tls(ours.settings("a")).server) as at:
        found = findings(at, *theirs.settings("b"), trusting)
    assert found["certificate"].status == "fail", "its peers will not accept it either"
    assert "does not accept our certificate" in found["controller"].found


def test_a_controller_that_is_not_there(ours: Authority) -> None:
    found = findings(f"node.controller=127.0.0.1:{free_port()}", *ours.settings("b"))
    assert found["controller"].status == "fail"
    assert "Connection refused" in found["controller"].found


def test_a_controller_that_hangs_up(ours: Authority) -> None:
    with controller(None) as at:
        found = findings(at, *ours.settings("b"))
    assert found["controller"].status == "fail"
    assert "hung up" in found["controller"].found
    assert "node.tls_cert" in found["controller"].fix


def test_an_address_of_another_machine(ours: Authority, tmp_path: Path) -> None:
    at = f"node.controller=127.0.0.1:{free_port()}"
    found = findings(at, "node.insecure=true", "node.address=192.0.2.1")
    assert found["node.address"].status == "fail"
    assert found["certificate"].status == "warn"
