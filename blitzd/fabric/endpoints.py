"""Where gRPC servers listen: a unix socket's path on this node, HOST:PORT between nodes.

Between nodes both sides show a certificate of the cluster's own authority (mutual TLS); who
has none is no peer. Plain TCP exists for trials and is asked for by name.
"""

import ssl
from dataclasses import dataclass
from functools import cached_property

from grpclib.client import Channel


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files: this node's certificate and key, and the authority that signed those
    of all nodes. With none of them: plain TCP."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError when some are given and some are not."""
        if any((self.cert, self.key, self.ca)) and not all((self.cert, self.key, self.ca)):
            raise ValueError("tls: cert, key and ca are needed together")

    def check(self) -> None:
        """Raises OSError (ssl.SSLError among them) when a file is not there or not of use."""
        _ = self.server, self.client

    @cached_property
    def server(self) -> ssl.SSLContext | None:
        """For a server that admits only clients with a certificate of the authority."""
        return self._context(ssl.Purpose.CLIENT_AUTH)

    @cached_property
    def client(self) -> ssl.SSLContext | None:
        """For a client that talks only to a server whose certificate names the host."""
        return self._context(ssl.Purpose.SERVER_AUTH)

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext | None:
        if not self.ca:
            return None
        context = ssl.create_default_context(purpose, cafile=self.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.cert, self.key)
        context.set_alpn_protocols(["h2"])
        return context


PLAIN = Tls()


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Raises ValueError unless it is HOST:PORT, with an IPv6 address in brackets."""
    host, colon, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"{endpoint!r}; accepted: HOST:PORT")
    return host, int(port)


def endpoint_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def channel_to(endpoint: str, tls: Tls) -> Channel:
    """Connects with the first call. Raises ValueError when `endpoint` is neither a path nor
    HOST:PORT."""
    if endpoint.startswith("/"):
        return Channel(path=endpoint)
    host, port = host_and_port(endpoint)
    return Channel(host, port, ssl=tls.client)
