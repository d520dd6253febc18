"""Is the process alive, may it be routed to, is it well: three questions, three routes."""

import msgspec
from aiohttp import web

from blitzd.node.face import NodeFace


class Probes:
    """`/live` restarts a process, `/ready` routes to it, `/health` is for people and for
    load balancers that only know one probe. Each answers 200 or 503 with the same body."""

    def __init__(self, node: NodeFace) -> None:
        self._node = node

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/live", self.live),
            web.get("/ready", self.ready),
            web.get("/health", self.health),
        ]

    async def live(self, _: web.Request) -> web.Response:
        return self._answer(self._node.health().live)

    async def ready(self, _: web.Request) -> web.Response:
        health = self._node.health()
        return self._answer(health.live and health.ready and not health.draining)

    async def health(self, _: web.Request) -> web.Response:
        health = self._node.health()
        return self._answer(health.live and not health.draining)

    def _answer(self, well: bool) -> web.Response:
        health = self._node.health()
        if not health.live:
            status = "stuck"
        elif health.draining:
            status = "draining"
        else:
            status = "ready" if health.ready else "not ready"
        body = {
            "status": status,
            "live": health.live,
            "ready": health.ready,
            "draining": health.draining,
            "reasons": health.reasons,
        }
        return web.Response(
            body=msgspec.json.encode(body),
            status=200 if well else 503,
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )
