"""How many replicas of each role serve, are on the way to it, have failed, or are free."""

from collections import Counter
from typing import Any

from blitzd.fsm.index import Group
from blitzd.fsm.load_plan import chains_json, loads_json
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import ReplicaState

S = ReplicaState
SERVING = {
    "prefill": frozenset({S.PREFILL, S.OLD_PREFILL}),
    "decode": frozenset({S.DECODE}),
}
FREE = frozenset({S.SHUTTING_NULL, S.INACTIVE})


DRAINING = {S.SHUTTING_PREFILL: "prefill", S.SHUTTING_DECODE: "decode"}


def standings(state: ClusterState) -> Counter[tuple[str, str]]:
    """By role and ready, loading, dead or draining (revived, it has the role again); and
    ("spare", "free"), those that could be given any role now. Costs the same for any number
    of replicas."""
    index = state.index
    found: Counter[tuple[str, str]] = Counter()
    for group, replicas in index.groups.items():
        found[_standing(group)] += len(replicas)
    for replica in map(state.replicas.__getitem__, index.restarting):
        if replica.stands_in:  # it leaves again when the one that restarts is back
            found[_standing(index.group_of(replica.id))] -= 1
    return found


def _standing(group: Group) -> tuple[str, str]:
    if group.role in SERVING:
        if group.troubled:
            return group.role, "dead"
        return group.role, "ready" if group.state in SERVING[group.role] else "loading"
    if group.state in DRAINING and not group.cordoned:
        return DRAINING[group.state], "draining"
    free = group.state in FREE and not group.cordoned and not group.troubled
    return group.role, "free" if free else "other"


def plan_json(state: ClusterState) -> dict[str, Any]:
    """What `/admin/plan` shows: the last record of the planner and what it waits for; the loads
    that follow, each with its rung of the ladder and why not by one before; their chains."""
    there, node, plan = standings(state), state.node, state.plan
    roles = {
        role: {
            "wanted": getattr(node, f"wanted_{role}"),
            **{name: there[role, name] for name in ("ready", "loading", "dead", "draining")},
            "verdict": wait.verdict,
            "since_ns": wait.since_ns,
            "peak": wait.peak,
        }
        for role, wait in (("prefill", plan.prefill), ("decode", plan.decode))
    }
    return {
        "autoscale": bool(node.policy.get("autoscale")),
        "pinned": bool(plan.pinned),
        "pinned_until_ns": plan.pinned_ns + plan.hold_ns if plan.hold_ns else 0,
        "roles": roles,
        "spare": there["spare", "free"],
        "seq": plan.seq,
        "decided_ns": plan.decided_ns,
        "inputs": plan.inputs,
        "terms": plan.terms,
        "clamps": list(plan.clamps),
        "loads": loads_json(state),
        "chains": chains_json(state),
        "pool": {name: state.replicas[name].pooled for name in state.index.pooled},
    }
