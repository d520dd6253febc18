"""What `blitzd doctor` looks at where there are other nodes: this node's address, its
certificate, and whether an agent can reach its controller."""

import socket
import ssl
from collections.abc import Iterator

from blitzd.cli.doctor_checks import Finding, Machine
from blitzd.cli.launch import tls_of
from blitzd.cli.settings import NodeSettings
from blitzd.fabric.endpoints import Tls, host_and_port

CONNECT_S = 3.0
WORD_S = 1.0
"""For a server to say something, or that it does not want us."""
HOW = "docs/nodes.md: setting up"
HUNG_UP = "the authority in its node.tls_ca must have signed node.tls_cert; or is it another port?"
"""As servers do, without a word, to those whose certificate they do not accept."""


def nodes(machine: Machine) -> Iterator[Finding]:
    node = machine.settings.node
    if not node.address:
        return
    yield _address(node)
    try:
        tls = tls_of(node)
    except (OSError, ValueError) as error:
        yield Finding("certificate", "fail", str(error), HOW)
        return
    if tls.ca:
        yield _certificate(node, tls)
    else:
        yield Finding("certificate", "warn", "node.insecure: anybody can join", HOW)
    if node.role == "agent":
        yield _controller(node, tls)


def _address(node: NodeSettings) -> Finding:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            node.address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        found = f"{node.address}: {error.strerror}"
        return Finding("node.address", "fail", found, "an address of this machine")
    return Finding("node.address", "ok", f"{node.address} is this machine's")


def _certificate(node: NodeSettings, tls: Tls) -> Finding:
    """By what its peers do with it: a handshake with ourselves, under both of its names."""
    for name in (node.name, node.address):
        try:
            _shake_hands(tls, name)
        except ssl.SSLCertVerificationError as error:
            found = f"{node.tls_cert}: {error.verify_message}"
            return Finding("certificate", "fail", found, HOW)
        except ssl.SSLError as error:
            return Finding("certificate", "fail", f"{node.tls_cert}: {error}", HOW)
    return Finding("certificate", "ok", f"names {node.name} and {node.address}")


def _shake_hands(tls: Tls, name: str) -> None:
    """Raises ssl.SSLError, as client and as server."""
    assert tls.client is not None
    assert tls.server is not None
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        tls.client.wrap_bio(here, there, server_hostname=name),
        tls.server.wrap_bio(there, here, server_side=True),
    )
    done: set[ssl.SSLObject] = set()
    for side in sides * 3:  # a handshake takes three turns
        if side not in done:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            done.add(side)


def _controller(node: NodeSettings, tls: Tls) -> Finding:
    where = node.controller
    host, port = host_and_port(where)
    try:
        with socket.create_connection((host, port), CONNECT_S) as plain:
            if tls.client is None:
                return Finding("controller", "ok", f"{where} answers")
            with tls.client.wrap_socket(plain, server_hostname=host) as secure:
                secure.settimeout(WORD_S)
                said = secure.recv(1)  # its settings, or that it does not know us
    except ssl.SSLCertVerificationError as error:
        found, fix = f"{where}: {error.verify_message}", "node.tls_ca, or the controller's tls_cert"
    except ssl.SSLEOFError:
        found, fix = f"{where} hung up", HUNG_UP
    except ssl.SSLError as error:
        found, fix = f"{where} does not accept our certificate ({error.reason})", "node.tls_cert"
    except TimeoutError:
        found, fix = f"{where} does not answer", "the network, or a firewall in between"
    except OSError as error:
        found, fix = f"{where}: {error.strerror}", "start the controller, or node.controller"
    else:
        if said:
            return Finding("controller", "ok", f"{where} answers, and accepts our certificate")
        found, fix = f"{where} hung up", HUNG_UP
    return Finding("controller", "fail", found, fix)
