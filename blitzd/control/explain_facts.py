"""What a decision rested on, read from the state right before it."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from blitzd.control.explain_plan import plan_facts
from blitzd.control.offers import Offer, decode_offer, prefill_offer
from blitzd.control.policy import Policy
from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm import (
    ClusterState,
    Lease,
    Pair,
    Replica,
    ReplicaState,
    Request,
    RequestState,
)
from blitzd.fsm.table import ACCEPTS_KV, ACCEPTS_PROMPTS, TRANSITIONS

Facts = dict[str, Any]
Shown = tuple[str, str, bool, str, Facts]
"""Replica, its state, whether it was chosen, why it could not be, numbers."""

S = ReplicaState
SCALING = (
    ev.ScaleSet,
    ev.MutationStarted,
    ev.ReplicaRevived,
    ev.NullReused,
    ev.RoleAssigned,
    ev.ShutdownStarted,
    ev.ReplicaExpired,
)
RAISES = ev.ReplicaRevived | ev.NullReused | ev.RoleAssigned | ev.LoadStarted | ev.PairOpened
LEASE = ("lease_ttl_ms", "lease_stall_ms")
POLICY_OF: dict[type[Payload], tuple[str, ...]] = {
    ev.RequestRejected: ("max_queued_requests",),
    ev.PrefillStarted: ("max_prefills_per_replica", "decode_reserve_tokens"),
    ev.MigrationStarted: ("decode_reserve_tokens", "max_imports_per_replica", *LEASE),
    ev.MigrationFailed: (*LEASE, "import_retry_ms"),
    ev.LeaseExtended: LEASE,
    ev.LinkCooled: ("link_cooldown_ms", "link_cooldown_max_ms"),
    ev.KvMismatched: ("kv_checksum_every",),
    ev.AuditFailed: ("audit_grace_ms",),
    ev.RequestResumed: ("max_resumes", "resume_backoff_ms"),
    ev.WorkerLost: ("restart_backoff_ms", "restart_backoff_max_ms"),
    ev.LoadFailed: ("restart_backoff_ms", "restart_backoff_max_ms"),
    ev.LoadStarted: (
        "ladder_map",
        "ladder_nvlink",
        "ladder_shard",
        "ladder_chain",
        "ladder_p2p",
        "ladder_host",
        "ladder_pool",
    ),
    ev.HostCopyDropped: ("host_ttl_ms",),
    ev.ReplicaRevived: ("ladder_revive",),
    ev.NullReused: ("ladder_revive", "ladder_reuse", "ladder_reuse_any"),
    ev.RoleAssigned: ("ladder_revive", "ladder_reuse", "ladder_reuse_any"),
    ev.MutationStarted: ("ladder_mutate", "ladder_live_decode"),
    ev.LoadFinished: ("mutate_after_load",),
    ev.ReplicaDeactivated: ("null_ttl_ms",),
    ev.PairOpened: ("pair_cap", "ladder_live"),
    ev.FollowStopped: ("resume_backoff_ms",),
    ev.ShutdownStarted: ("drain_ms",),
    ev.RestartStarted: ("drain_ms",),
    ev.RestartEnded: ("restart_limit_ms",),
}


def facts_of(state: ClusterState, policy: Policy, record: Record, cause: Payload | None) -> Facts:
    """The entities that the event names, the cluster where it matters, and the policy's
    numbers that it depends on."""
    event = record.payload
    found: Facts = {"phase": state.node.phase}
    for replica_id in _replicas_named(event, cause):
        replica = state.replicas.get(replica_id)
        shown = "unknown" if replica is None else replica_facts(state, replica)
        found.setdefault("replicas", {})[replica_id] = shown
    lease = state.leases.get(getattr(event, "lease_id", 0))
    if lease is not None:
        found["lease"] = _lease_facts(lease, record.mono_ns)
    request_id = lease.request_id if lease else getattr(event, "request_id", 0)
    request = state.requests.get(request_id)
    if request is not None:
        found["request"] = _request_facts(request, record.mono_ns)
    pair = state.pairs.get(getattr(event, "pair_id", 0))
    if pair is not None:
        found["pair"] = _pair_facts(pair, record.mono_ns)
    if isinstance(event, ev.RequestRejected):
        found |= _admission_facts(state)
    if isinstance(event, SCALING) or isinstance(cause, ev.ScaleRequested):
        found["scale"] = _scale_facts(state)
    if isinstance(event, RAISES) and event.rung:
        found["ladder"] = dict(event.skipped) | {event.rung: "taken"}
    if isinstance(event, ev.PlanDecided | ev.PlanHeld):
        found |= plan_facts(state, policy, event)
    if names := POLICY_OF.get(type(event)):
        found["policy"] = {name: getattr(policy, name) for name in names}
    return found


def _replicas_named(event: Payload, cause: Payload | None) -> list[str]:
    fields: tuple[str, ...] = ("replica", "source", "rest", "target", "new", "old", "stands_in_for")
    # A load's `source` is where its weights come from, which is no replica.
    if isinstance(event, ev.LoadStarted | ev.LoadFinished | ev.PairOpened):
        fields = ("replica", "new", "old")
    named = [getattr(payload, field, "") for payload in (event, cause) for field in fields]
    if isinstance(cause, ev.LoadEnded):
        named = [name for name in named if name != cause.source]
    return [name for name in dict.fromkeys(named) if name]


def replica_facts(state: ClusterState, replica: Replica) -> Facts:
    reserved = state.blocks_reserved(replica.id)
    return {
        "state": replica.state.value,
        "epoch": replica.epoch,
        "role": replica.role,
        "configured": replica.configured,
        "worker": replica.worker,
        "cordoned": bool(replica.cordoned),
        "requests": len(state.requests_on(replica.id)),
        "blocks_free": replica.blocks_total - reserved,
        "blocks_reserved": reserved,
        "failures": replica.failures,
        "retry_ns": replica.retry_ns,
        "takes": sorted(trigger for at, trigger in TRANSITIONS if at is replica.state),
    }


def _request_facts(request: Request, now_ns: int) -> Facts:
    return {
        "id": request.id,
        "state": request.state.value,
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "age_ms": (now_ns - request.arrived_ns) / 1e6,
        "source": request.source,
        "rest": request.rest,
        "split_layer": request.split_layer,
        "target": request.target,
        "lease_id": request.lease_id,
        "retry_ns": request.retry_ns,
        "resumes": request.resumes,
        "output_tokens": request.output_tokens,
        "losses": [str(loss) for loss in request.losses],
        "tried": list(request.tried),
    }


def _lease_facts(lease: Lease, now_ns: int) -> Facts:
    return {
        "id": lease.id,
        "request": lease.request_id,
        "source": f"{lease.source}/{lease.source_epoch}",
        "rest": f"{lease.rest}/{lease.rest_epoch}" if lease.rest else "",
        "split_layer": lease.split_layer,
        "target": f"{lease.target}/{lease.target_epoch}",
        "age_ms": (now_ns - lease.opened_ns) / 1e6,
        "left_ms": (lease.expires_ns - now_ns) / 1e6,
        "bytes_moved": lease.bytes_moved,
    }


def _pair_facts(pair: Pair, now_ns: int) -> Facts:
    return {
        "id": pair.id,
        "new": pair.new,
        "old": pair.old,
        "cap": pair.cap_at(now_ns),
        "following": bool(pair.following),
        "follow_faults": pair.follow_faults,
        "age_ms": (now_ns - pair.opened_ns) / 1e6,
    }


def _admission_facts(state: ClusterState) -> Facts:
    room = {
        role: {
            r.id: r.blocks_total * r.block_tokens
            for r in state.replicas.values()
            if r.state in accepting
        }
        for role, accepting in (("prefill", ACCEPTS_PROMPTS), ("decode", ACCEPTS_KV))
    }
    return {"queued": len(state.index.queued), "room_tokens": room}


def _scale_facts(state: ClusterState) -> Facts:
    wanted = {"prefill": state.node.wanted_prefill, "decode": state.node.wanted_decode}
    there = Counter(replica.role for replica in state.replicas.values())
    return {"wanted": wanted, "there": dict(sorted(there.items()))}


# Candidates.


def candidates_of(state: ClusterState, policy: Policy, event: Payload) -> list[Shown]:
    """Every replica, for decisions that choose one; the chosen first, then who could have
    been, then the others."""
    chooser = CHOOSERS.get(type(event))
    if chooser is None:
        return []
    found = list(chooser(state, policy, event))
    return sorted(found, key=lambda shown: (not shown[2], bool(shown[3]), shown[0]))


def _prefills(state: ClusterState, policy: Policy, event: ev.PrefillStarted) -> Iterable[Shown]:
    request = state.requests[event.request_id]
    for replica in state.replicas.values():
        offer = prefill_offer(state, policy, request, replica, state.mono_ns)
        facts = {"granted": offer.busy, "prompt_tokens_granted": offer.load}
        yield _offered(offer, event.replica, facts)


def _decodes(state: ClusterState, policy: Policy, event: ev.MigrationStarted) -> Iterable[Shown]:
    request = state.requests[event.request_id]
    for replica in state.replicas.values():
        offer = decode_offer(state, policy, request, replica)
        yield _offered(offer, event.target, {"blocks_in_use": offer.load, "importing": offer.busy})


def _offered(offer: Offer, chosen: str, facts: Facts) -> Shown:
    replica = offer.replica
    facts |= {"blocks_needed": offer.blocks, "blocks_free": offer.free, "lost": offer.lost}
    return replica.id, replica.state.value, replica.id == chosen, offer.refusal, facts


def _of_states(
    *states: ReplicaState, role: Callable[[Any], str] | None = None
) -> Callable[[ClusterState, Policy, Any], Iterable[Shown]]:
    """Replicas in one of `states`, and of one role: the least blocks reserved is taken."""

    def choose(state: ClusterState, _: Policy, event: Any) -> Iterable[Shown]:
        wanted = role(event) if role else ""
        for replica in state.replicas.values():
            refusal = ""
            if replica.state not in states:
                refusal = f"it is {replica.state}, not {' or '.join(states)}"
            elif wanted and replica.role != wanted:
                refusal = f"its role is {replica.role}, not {wanted}"
            facts = {
                "role": replica.role,
                "cordoned": bool(replica.cordoned),
                "blocks_reserved": state.blocks_reserved(replica.id),
            }
            chosen = replica.id == event.replica
            yield replica.id, replica.state.value, chosen, refusal, facts

    return choose


def _opposite(event: ev.MutationStarted) -> str:
    return "decode" if event.role == "prefill" else "prefill"


CHOOSERS: dict[type[Payload], Callable[[ClusterState, Policy, Any], Iterable[Shown]]] = {
    ev.PrefillStarted: _prefills,
    ev.MigrationStarted: _decodes,
    ev.MutationStarted: _of_states(S.PREFILL, S.DECODE, role=_opposite),
    ev.ReplicaRevived: _of_states(S.SHUTTING_PREFILL, S.SHUTTING_DECODE),
    ev.NullReused: _of_states(S.SHUTTING_NULL),
    ev.RoleAssigned: _of_states(S.INACTIVE, S.FAILED),
    ev.ShutdownStarted: _of_states(S.PREFILL, S.DECODE, S.COLOCATED),
    ev.ReplicaExpired: _of_states(S.DECODE, role=lambda _: "decode"),
}


def candidates_of_waiting(state: ClusterState, policy: Policy, event: Payload) -> list[Shown]:
    """For a request that nobody took in the turn of `event`: why each replica did not."""
    request = state.requests.get(getattr(event, "request_id", 0))
    if request is None or request.lease_id:
        return []
    offer_of = OFFERS_TO.get(request.state)
    if offer_of is None:
        return []
    offers = [offer_of(state, policy, request, replica) for replica in state.replicas.values()]
    return sorted(_offered(offer, "", {}) for offer in offers)


OFFERS_TO: dict[RequestState, Callable[[ClusterState, Policy, Request, Replica], Offer]] = {
    RequestState.QUEUED: lambda state, policy, request, replica: prefill_offer(
        state, policy, request, replica, state.mono_ns
    ),
    RequestState.MIGRATING: decode_offer,
}
