"""`blitzd status`: what a daemon does, for a person at a terminal."""

import json
from typing import Annotated, Any

from cyclopts import Parameter

from blitzd.cli.admin_client import AdminClient, Where
from blitzd.cli.verbs import report

OPEN = ("queued", "prefilling", "relayed", "migrating", "decoding")
ENDED = ("finished", "failed", "cancelled", "rejected")


def status(*, where: Annotated[Where, Parameter(name="*")] = Where()) -> int:  # noqa: B008
    """Show replicas, queue, drains and trouble."""
    return report("status", where, lambda client: _show(client, where))


def _show(client: AdminClient, where: Where) -> int:
    state = client.get("/admin/state")
    if where.json:
        print(json.dumps(state))
    else:
        print("\n".join(lines_of(state)))
    return 0


def lines_of(state: dict[str, Any]) -> list[str]:
    node, requests, queue = state["node"], state["requests"], state["queue"]
    now_ns = state["now_ns"]
    phase = node["phase"]
    if phase == "draining":
        phase += f", {_left(node['drain_deadline_ns'], now_ns)} left"
    found = [
        f"node {node['name']}  blitzd {node['version']}  {phase}  log at {state['seq']}",
        f"queue  {queue['requests']} requests, {queue['tokens']} tokens",
        "open   " + ", ".join(f"{requests[name]} {name}" for name in OPEN if name in requests),
        "ended  " + ", ".join(f"{requests[name]} {name}" for name in ENDED if name in requests),
    ]
    for role in state["unserved"]:
        found.append(f"no {role} replica is ready: what needs one waits")
    wanted = node["wanted"]
    if any(wanted.values()):
        found.append(f"scaled to {wanted['prefill']} prefill, {wanted['decode']} decode")
    if node["rolling_restart"]:
        found.append(f"rolling restart of {', '.join(node['rolling_restart'])}")
    found += [_pair(pair) for pair in state["pairs"]]
    found += [_agent(agent) for agent in state["agents"]]
    found += [_links(node) for node in state["topology"]]
    return [*found, "", *_table(state["replicas"], now_ns)]


def _pair(pair: dict[str, Any]) -> str:
    who = f"{pair['new']} serves while it loads, {pair['old']} finishes for it"
    follows = "" if pair["following"] else ", which does not follow yet"
    return f"pair {pair['id']}  {who}{follows}  {pair['pending']} requests pending"


def _agent(agent: dict[str, Any]) -> str:
    if agent["phase"] == "lost":
        return f"agent  {agent['node']}  lost: {agent['trouble']}"
    size = f"{agent['arch']}, {agent['cpus']} CPUs, {agent['memory_mib']} MiB"
    return f"agent  {agent['node']}  {agent['phase']} at {agent['address']}  {size}"


def _links(node: dict[str, Any]) -> str:
    names = ", ".join(link["name"] for link in node["links"])
    found = f"links  {node['node']}  {names}: {_gbit_s(node['rate_bytes_s'])} each"
    if node["leaf"]:
        found += f", leaf {node['leaf']}"
    if node["domain"] != node["node"] or node["domain_rate_bytes_s"]:
        found += f", domain {node['domain']}"
        if node["domain_rate_bytes_s"]:
            found += f" of {_gbit_s(node['domain_rate_bytes_s'])}"
    return found


def _gbit_s(bytes_s: int) -> str:
    return f"{bytes_s * 8 / 1e9:g} Gbit/s"


HEAD = ("id", "role", "state", "epoch", "pid", "layers", "KV blocks", "requests", "")


def _table(replicas: list[dict[str, Any]], now_ns: int) -> list[str]:
    rows = [HEAD, *(_row(replica, now_ns) for replica in replicas)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD) - 1)]
    return [
        "  ".join(
            [*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in rows
    ]


def _row(r: dict[str, Any], now_ns: int) -> tuple[str, ...]:
    layers = f"{r['layers_ready']}/{r['layers_total']}" if r["layers_total"] else "-"
    # What the worker says it uses, and what is promised beyond.
    used = max(r["blocks_used"], r["blocks_reserved"])
    blocks = f"{used}/{r['blocks_total']}" if r["blocks_total"] else "-"
    names = (r["id"], r["role"], r["state"], str(r["epoch"]), str(r["pid"] or "-"))
    return (*names, layers, blocks, str(r["inflight"]), _notes(r, now_ns))


def _notes(r: dict[str, Any], now_ns: int) -> str:
    notes = []
    if r["cordoned"]:
        notes.append("drained" if not r["inflight"] else "draining")
    if r["restarting"]:
        notes.append("restarting")
    if r["stands_in"]:
        notes.append(f"stands in for {r['stands_in']}")
    if r["drain_deadline_ns"]:
        notes.append(f"{_left(r['drain_deadline_ns'], now_ns)} left")
    if r["pooled"]:
        notes.append("keeps the weights for others")
    if r["worker"] != "attached":
        notes.append(f"worker {r['worker']}")
    if r["trouble"]:
        notes.append(r["trouble"])
    return ", ".join(notes)


def _left(deadline_ns: int, now_ns: int) -> str:
    return f"{max(0, deadline_ns - now_ns) / 1e9:.0f} s"
