"""Who may use the admin API: those on this machine, and no web page that they look at.

A page cannot reach the unix socket. On the TCP port it can try two things: a form, which
cannot say that it is JSON without asking first, and a name of its own that it lets lead to
this machine (DNS rebinding), which the Host header then gives away.
"""

import ipaddress

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from blitzd.http.errors import ApiError
from blitzd.http.neutral import shown


def refuse_strangers(name: str) -> Middleware:
    """Refuses requests to another host than an address, localhost or `name` (403), and
    commands that do not say that they are JSON (415)."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _on_unix_socket(request) and not _is_ours(request.host, name):
            raise ApiError(
                403,
                f"Host is {shown(request.host)}; accepted: an IP address or localhost, as in"
                " http://127.0.0.1:11237",
                code="forbidden_host",
                param="Host",
            )
        if request.method == "POST" and "Content-Type" not in request.headers:
            raise ApiError(
                415,
                "Content-Type is missing; accepted: application/json (an empty body is {})",
                code="unsupported_media_type",
                param="Content-Type",
            )
        return await handler(request)

    return guarded


def _on_unix_socket(request: web.Request) -> bool:
    assert request.transport is not None
    return isinstance(request.transport.get_extra_info("sockname"), str | bytes)


def _is_ours(host: str, name: str) -> bool:
    """`host` is that of a Host header, with or without a port."""
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    if host.lower() in ("localhost", name.lower()):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
