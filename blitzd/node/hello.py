"""Which agents a controller takes."""

import ipaddress
import re
from collections import Counter
from contextvars import ContextVar

from grpclib.events import RecvRequest

from blitzd.node.config import NodeConfig
from blitzd.proto.blitzd.node import v1 as pb

ROLES = ("prefill", "decode", "colocated", "spare")
REPLICAS = 1024
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
"""A replica of it, NODE.r63, is a name of at most 64 characters."""
REPLICA = re.compile(r"r\d{1,4}")

certified_names: ContextVar[frozenset[str] | None] = ContextVar("certified_names", default=None)
"""Of the caller, by its certificate; None: it has shown none, as nobody asked."""


async def names_of_peer(event: RecvRequest) -> None:
    """A listener for the server's RecvRequest."""
    cert = event.peer.cert()
    if cert is not None:
        alternatives = cert.get("subjectAltName", ())
        certified_names.set(frozenset(str(name) for _, name in alternatives))


def refusal(
    hello: pb.Hello, config: NodeConfig, digest: str, certified: frozenset[str] | None
) -> str:
    """Why this agent cannot join, with what would be accepted; empty: it can."""
    if not NODE.fullmatch(hello.node):
        return f"node.name: {hello.node!r}; accepted: a host name of at most 48 characters"
    if hello.node == config.node:
        return f"node.name: {hello.node}; the controller has that name, accepted: another"
    if config.tls.ca and hello.node not in (certified or ()):
        named = ", ".join(sorted(certified or ())) or "nobody"
        return f"node.name: {hello.node}; the certificate is that of {named}"
    if not _addresses(hello.address):
        return f"node.address: {hello.address!r}; other nodes need one to reach its workers"
    if hello.model_digest != digest:
        return f"model.name, model.dtype: digest {hello.model_digest}; the controller has {digest}"
    if hello.kv_blocks < config.kv_blocks:
        needed = f"at least {config.kv_blocks}, as at the controller"
        return f"engine.kv_mib: {hello.kv_blocks} KV blocks; accepted: {needed}"
    return _replicas(hello)


def _addresses(address: str) -> bool:
    try:
        return not ipaddress.ip_address(address).is_unspecified
    except ValueError:
        return bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", address))


def _replicas(hello: pb.Hello) -> str:
    ids = hello.replica_ids
    if not 1 <= len(ids) <= REPLICAS or len(ids) != len(hello.roles):
        return f"{len(ids)} replicas with {len(hello.roles)} roles; accepted: 1 to {REPLICAS}"
    counts = Counter(ids)
    wrong = [name for name in counts if counts[name] > 1 or not REPLICA.fullmatch(name)]
    wrong += [role for role in hello.roles if role not in ROLES]
    return f"replicas: {', '.join(wrong[:8])}" if wrong else ""
