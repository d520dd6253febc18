"""What an operator does: replicas, scaling, restarts, the policy.

Each command is answered once what it led to is on disk. Each may be repeated: what is so
already leads to nothing, and `events` is empty.
"""

from typing import Any

import msgspec
from aiohttp import web

from blitzd.http.body import read_json_body
from blitzd.http.errors import ApiError, bad_request
from blitzd.http.limits import Limits
from blitzd.http.neutral import shown
from blitzd.http.schema import parse_object, unknown_parameter
from blitzd.node.face import (
    MAX_DEADLINE_S,
    ROLES,
    ChangePolicy,
    Deactivate,
    Drain,
    GoLive,
    Mutate,
    NodeFace,
    OperatorCommand,
    Release,
    Remove,
    Restart,
    Scale,
    StopRestarts,
    Undrain,
)

MAX_REPLICAS = 100_000


class AdminVerbs:
    def __init__(self, node: NodeFace, limits: Limits) -> None:
        self._node = node
        self._limits = limits

    def routes(self) -> list[web.RouteDef]:
        one = "/admin/replicas/{replica}"
        return [
            web.get("/admin/replicas", self.replicas),
            web.get(one, self.replica),
            web.post(f"{one}/drain", self.drain),
            web.post(f"{one}/undrain", self.undrain),
            web.post(f"{one}/restart", self.restart),
            web.post(f"{one}/mutate", self.mutate),
            web.post(f"{one}/deactivate", self.deactivate),
            web.post(f"{one}/live", self.live),
            web.post("/admin/restart", self.restart_all),
            web.post("/admin/scale", self.scale),
            web.get("/admin/plan", self.plan),
            web.get("/admin/policy", self.policy),
            web.post("/admin/policy", self.change_policy),
        ]

    async def replicas(self, _: web.Request) -> web.Response:
        state = self._node.state()
        return _json({name: state[name] for name in ("seq", "now_ns", "replicas")})

    async def replica(self, request: web.Request) -> web.Response:
        return _json(self._shown(request.match_info["replica"]))

    async def drain(self, request: web.Request) -> web.Response:
        body = await self._body(request, "deadline_s")
        return await self._do(Drain(request.match_info["replica"], _deadline(body)))

    async def undrain(self, request: web.Request) -> web.Response:
        await self._body(request)
        return await self._do(Undrain(request.match_info["replica"]))

    async def restart(self, request: web.Request) -> web.Response:
        body = await self._body(request, "deadline_s")
        return await self._do(Restart(request.match_info["replica"], _deadline(body)))

    async def restart_all(self, request: web.Request) -> web.Response:
        body = await self._body(request, "deadline_s", "stop")
        if "stop" not in body:
            return await self._do(Restart("", _deadline(body)))
        if not _only_true(body, "stop"):
            raise bad_request(f"stop is {shown(body['stop'])}; accepted: true, alone", param="stop")
        return await self._do(StopRestarts())

    async def mutate(self, request: web.Request) -> web.Response:
        body = await self._body(request, "role")
        role = _required(body, "role")
        if role not in ROLES:
            message = f"role is {shown(role)}; accepted: {', '.join(ROLES)}"
            raise bad_request(message, param="role")
        return await self._do(Mutate(request.match_info["replica"], role))

    async def deactivate(self, request: web.Request) -> web.Response:
        await self._body(request)
        return await self._do(Deactivate(request.match_info["replica"]))

    async def live(self, request: web.Request) -> web.Response:
        body = await self._body(request, "old")
        old = self._shown(_required(body, "old"), "old")
        return await self._do(GoLive(request.match_info["replica"], old["id"]))

    async def scale(self, request: web.Request) -> web.Response:
        body = await self._body(request, "prefill", "decode", "remove", "auto")
        if "auto" in body:
            if not _only_true(body, "auto"):
                raise bad_request(
                    "auto is accepted alone and as true: the planner decides the counts",
                    param="auto",
                )
            return await self._do(Release())
        if "remove" not in body:
            counts = (_integer(body, name, 0, MAX_REPLICAS) for name in ("prefill", "decode"))
            return await self._do(Scale(*counts))
        if len(body) > 1:
            raise bad_request(
                "remove is accepted alone: prefill and decode say how many there are to be",
                param="remove",
            )
        # Whatever it is, no string or not: only what is there goes on.
        replica = self._shown(_required(body, "remove"))
        return await self._do(Remove(replica["id"]))

    async def plan(self, _: web.Request) -> web.Response:
        state = self._node.state()
        return _json(state["plan"] | {"now_ns": state["now_ns"]})

    async def policy(self, _: web.Request) -> web.Response:
        return _json({"policy": self._node.policy()})

    async def change_policy(self, request: web.Request) -> web.Response:
        known = self._node.policy()
        body = await self._body(request, *known, "preset")
        preset = body.pop("preset", "")
        if not isinstance(preset, str):
            raise bad_request(
                f"preset is {shown(preset)}; accepted: a name of docs/baselines.md, or several"
                " with commas",
                param="preset",
            )
        if not body and not preset:
            raise bad_request(
                f"the body names no value; accepted: preset, {', '.join(sorted(known))}",
                param=None,
                code="missing_required_parameter",
            )
        values = tuple(
            (name, _integer(body, name, known[name]["min"], known[name]["max"])) for name in body
        )
        return await self._do(ChangePolicy(values, preset))

    async def _body(self, request: web.Request, *accepted: str) -> dict[str, Any]:
        """An object with no other names than these. Raises ApiError."""
        raw = await read_json_body(request, self._limits)
        body = parse_object(raw) if raw.strip() else {}
        for name in body:
            if name not in accepted:
                raise unknown_parameter(name, list(accepted))
        return body

    async def _do(self, command: OperatorCommand) -> web.Response:
        replica = getattr(command, "replica", "")
        if replica:
            self._shown(replica)  # what nobody has is not for the log
        events = await self._node.command(command)
        answer: dict[str, Any] = {"seq": self._node.state()["seq"], "events": events}
        if replica:
            answer["replica"] = self._shown(replica)
        return _json(answer)

    def _shown(self, wanted: object, param: str = "replica") -> dict[str, Any]:
        """Raises ApiError (404)."""
        replicas: list[dict[str, Any]] = self._node.state()["replicas"]
        for replica in replicas:
            if replica["id"] == wanted:
                return replica
        known = ", ".join(r["id"] for r in replicas)
        message = f"no replica {shown(wanted)}; there are {known}"
        raise ApiError(404, message, code="unknown_replica", param=param)


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _required(body: dict[str, Any], name: str) -> Any:
    if body.get(name) is None:
        raise bad_request(f"{name} is missing", param=name, code="missing_required_parameter")
    return body[name]


def _only_true(body: dict[str, Any], name: str) -> bool:
    """Whether it is there alone, and JSON's true: 1 is none, whatever Python says."""
    return len(body) == 1 and body[name] is True


def _integer(body: dict[str, Any], name: str, low: int, high: int) -> int:
    value = _required(body, name)
    # JSON's true is no number, whatever Python says.
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise bad_request(
            f"{name} is {shown(value)}; accepted: an integer from {low} to {high}", param=name
        )
    return value


def _deadline(body: dict[str, Any]) -> float | None:
    value = body.get("deadline_s")
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer may be too large for any float.
    if not number or not 0 <= value <= MAX_DEADLINE_S:
        raise bad_request(
            f"deadline_s is {shown(value)}; accepted: seconds from 0 to {MAX_DEADLINE_S:.0f}",
            param="deadline_s",
        )
    return float(value)
