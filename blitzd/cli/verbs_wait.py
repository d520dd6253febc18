"""Waiting until what an operator asked for is so, by following the event log."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from blitzd.cli.admin_client import AdminClient

SERVING = {"prefill": "Prefill", "decode": "Decode", "colocated": "Colocated"}
UNDER_WAY = ("ShuttingPrefill", "ShuttingDecode", "AusPrefill", "AusDecode", "MutatingToDecode")

QUIET = frozenset({"LoadProgressed", "OccupancySampled", "StateHashed", "StaleNoticeIgnored"})
"""Events that bring nothing nearer."""


ABOUT_MORE_THAN_ONE = frozenset({"RollingRestartEnded", "PairSettled", "PairBroken"})
"""Events that name no replica and may end a wait."""


class NotDone(Exception):
    """It did not come so far, or came otherwise. The message says where it is."""


class Until(NamedTuple):
    state: Callable[[dict[str, Any]], str]
    """Why it is not so yet, by the state; empty: it is."""
    event: Callable[[dict[str, Any]], str | None] = lambda event: None
    """What an event says about it: empty: it is so; why it will not be so any more; None:
    nothing."""
    told: bool = False
    """It ends with an event, which says how: the state alone would not."""
    replica: str = ""
    """Whose events are worth telling; empty: those of all."""


def wait_until(
    client: AdminClient,
    answer: dict[str, Any],
    until: Until,
    timeout_s: float,
    tell: Callable[[dict[str, Any]], None] | None,
) -> float:
    """Seconds that it took. Raises NotDone, NoDaemon, Refused."""
    began = time.monotonic()
    left = until.state(client.get("/admin/state"))
    if not left:
        return time.monotonic() - began
    for event in client.follow(answer["seq"], began + timeout_s):
        about = event["payload"].get("replica") if event["kind"] == "event" else None
        if about is None and event["type"] not in ABOUT_MORE_THAN_ONE:
            continue
        if event["type"] in QUIET or "request_id" in event["payload"]:
            continue
        if tell is not None and until.replica in ("", about):
            tell(event)
        said = until.event(event)
        if said:
            raise NotDone(said)
        left = until.state(client.get("/admin/state"))
        if said == "" or not (left or until.told):
            return time.monotonic() - began
    if time.monotonic() - began < timeout_s:
        raise NotDone(f"the daemon has stopped; {left}")
    raise NotDone(f"not done within {timeout_s:g} s, and still under way: {left}")


def _replica(state: dict[str, Any], replica_id: str) -> dict[str, Any]:
    for replica in state["replicas"]:
        if replica["id"] == replica_id:
            found: dict[str, Any] = replica
            return found
    raise NotDone(f"there is no {replica_id} any more")


def _says(replica: dict[str, Any]) -> str:
    said = f"{replica['id']} is {replica['state']} with {replica['inflight']} requests"
    return f"{said} ({replica['trouble']})" if replica["trouble"] else said


def emptied(replica_id: str) -> Until:
    """Nothing runs there any more."""

    def state(shown: dict[str, Any]) -> str:
        replica = _replica(shown, replica_id)
        empty = replica["state"] in ("ShuttingNull", "Inactive", "Failed")
        return "" if empty else _says(replica)

    def event(record: dict[str, Any]) -> str | None:
        revived = record["type"] == "ReplicaRevived"
        mine = record["payload"].get("replica") == replica_id
        return f"{replica_id} was brought back meanwhile" if revived and mine else None

    return Until(state, event, replica=replica_id)


def restarted(replica_id: str) -> Until:
    def state(shown: dict[str, Any]) -> str:
        replica = _replica(shown, replica_id)
        return f"{_says(replica)}, restarting" if replica["restarting"] else ""

    def event(record: dict[str, Any]) -> str | None:
        payload = record["payload"]
        if record["type"] != "RestartEnded" or payload["replica"] != replica_id:
            return None
        return payload["reason"] and f"{replica_id}: {payload['reason']}"

    return Until(state, event, told=True, replica=replica_id)


def rolled() -> Until:
    def state(shown: dict[str, Any]) -> str:
        left = shown["node"]["rolling_restart"]
        now = ", ".join(_says(r) for r in shown["replicas"] if r["restarting"])
        return f"of {', '.join(left)}: {now or 'none restarts now'}" if left else ""

    def event(record: dict[str, Any]) -> str | None:
        ended = record["type"] == "RollingRestartEnded"
        return record["payload"]["reason"] if ended else None

    return Until(state, event, told=True)


def has_role(replica_id: str, role: str) -> Until:
    def state(shown: dict[str, Any]) -> str:
        replica = _replica(shown, replica_id)
        if role == "spare":
            there = replica["state"] in ("ShuttingNull", "Inactive")
        else:
            there = replica["state"] == SERVING[role]
        return "" if there else _says(replica)

    return Until(state, replica=replica_id)


def went_live(new: str, old: str) -> Until:
    """Both are ordinary prefill replicas."""
    pair_id = 0

    def state(shown: dict[str, Any]) -> str:
        nonlocal pair_id
        both = [_replica(shown, replica_id) for replica_id in (new, old)]
        pair_id = both[0]["pair"] or pair_id
        if all(replica["state"] == SERVING["prefill"] for replica in both):
            return ""
        return ", ".join(map(_says, both))

    def event(record: dict[str, Any]) -> str | None:
        payload = record["payload"]
        broken = record["type"] == "PairBroken" and payload["pair_id"] == pair_id
        return payload["reason"] if broken else None

    return Until(state, event, replica=new)


def scaled() -> Until:
    """As many serve as are wanted, and what goes is empty."""

    def state(shown: dict[str, Any]) -> str:
        wanted = shown["node"]["wanted"]
        standing_in = [r["id"] for r in shown["replicas"] if r["stands_in"]]
        replicas = [r for r in shown["replicas"] if r["id"] not in standing_in]
        there = {role: sum(r["state"] == SERVING[role] for r in replicas) for role in wanted}
        moving = [r for r in replicas if r["state"] in UNDER_WAY]
        if there == wanted and not moving:
            return ""
        counts = ", ".join(f"{there[r]} of {wanted[r]} {r}" for r in sorted(wanted))
        drained = [
            f"{r['id']} is drained, which scaling does not bring back"
            for r in replicas
            if r["cordoned"] and not r["restarting"] and r not in moving
        ]
        return "; ".join([counts, *map(_says, moving), *drained])

    return Until(state)
