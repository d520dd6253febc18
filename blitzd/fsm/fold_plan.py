"""Folders of the planner's events, and what it takes from those of requests.

The latter only while the planner is on: nobody else asks for it, and a log of a time without
planner folds to what it folded to.
"""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.entities import Replica, Request
from blitzd.fsm.folding import folds
from blitzd.fsm.link import Lease
from blitzd.fsm.plan import BUCKETS, Wait
from blitzd.fsm.state import ClusterState

MS = 1_000_000


@folds(ev.PlanDecided)
def _(state: ClusterState, event: ev.PlanDecided, record: Record) -> None:
    plan, node = state.plan, state.node
    node.wanted_prefill, node.wanted_decode = event.wanted_prefill, event.wanted_decode
    plan.prefill = _waits(plan.prefill, event.prefill, plan.prefill.peak, record.mono_ns)
    plan.decode = _waits(plan.decode, event.decode, plan.decode.peak, record.mono_ns)
    plan.decided_ns = record.mono_ns
    _keep(state, event, record)
    state.touch("node", 0)


@folds(ev.PlanHeld)
def _(state: ClusterState, event: ev.PlanHeld, record: Record) -> None:
    plan = state.plan
    plan.prefill = _waits(plan.prefill, event.prefill, event.prefill_peak, record.mono_ns)
    plan.decode = _waits(plan.decode, event.decode, event.decode_peak, record.mono_ns)
    plan.held_ns = record.mono_ns
    _keep(state, event, record)


def _waits(was: Wait, verdict: str, peak: int, now_ns: int) -> Wait:
    since_ns = was.since_ns if was.verdict == verdict else now_ns
    return Wait(verdict, since_ns, peak if verdict == "down_wait" else 0)


def _keep(state: ClusterState, event: ev.PlanDecided | ev.PlanHeld, record: Record) -> None:
    plan = state.plan
    plan.seq = record.seq
    plan.inputs, plan.terms, plan.clamps = dict(event.inputs), dict(event.terms), event.clamps
    state.touch("plan", 0)


@folds(ev.PlannerPinned)
def _(state: ClusterState, event: ev.PlannerPinned, record: Record) -> None:
    plan = state.plan
    plan.pinned, plan.pinned_ns, plan.hold_ns = 1, record.mono_ns, event.hold_ns
    state.touch("plan", 0)


@folds(ev.PlannerReleased)
def _(state: ClusterState, event: ev.PlannerReleased, record: Record) -> None:
    plan = state.plan
    plan.pinned = plan.pinned_ns = plan.hold_ns = 0
    state.touch("plan", 0)


# What requests tell. A replica works on several at a time: the time that one took begins
# when the one before was done, as behind any counter with one clerk.


def _on(state: ClusterState) -> bool:
    return bool(state.node.policy.get("autoscale"))


def arrived(state: ClusterState, tokens: int, now_ns: int) -> None:
    if _on(state):
        window_ns = max(1, state.node.policy.get("arrival_window_ms", 0)) * MS
        state.plan.arrived(tokens, now_ns, -(-window_ns // BUCKETS))
        state.touch("plan", 0)


def granted(state: ClusterState, replica: Replica, now_ns: int) -> None:
    """Before the request is there."""
    if _on(state) and not state.index.prefilling[replica.id]:
        replica.prompt_ns = now_ns
        state.touch("replica", replica.id)


def prefilled(state: ClusterState, request: Request, now_ns: int) -> None:
    replica = state.replicas.get(request.runner[0])
    if not _on(state) or replica is None or not replica.prompt_ns:
        return
    busy_ns = now_ns - replica.prompt_ns
    # Of one that two replicas shared, or that waited for layers, nobody learns how fast one is.
    if not request.rest:
        state.plan.prefilled = state.plan.prefilled.with_more(request.known_tokens, busy_ns)
    replica.prompt_ns = now_ns
    state.touch("replica", replica.id)
    state.touch("plan", 0)


def moved(state: ClusterState, request: Request, lease: Lease, now_ns: int) -> None:
    replica = state.replicas.get(lease.target)
    if not _on(state) or replica is None:
        return
    busy_ns = now_ns - max(lease.opened_ns, replica.import_ns)
    state.plan.moved = state.plan.moved.with_more(request.known_tokens, busy_ns)
    replica.import_ns = now_ns
    state.touch("replica", replica.id)
    state.touch("plan", 0)
