"""Folders of leases under way, link health and audits."""

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm.fold_requests import settle_down
from blitzd.fsm.folding import IllegalEvent, count, folds, lease_of, replica_of, request_of
from blitzd.fsm.link import Link, link_key
from blitzd.fsm.request import RequestState, next_request_state
from blitzd.fsm.state import ClusterState


@folds(ev.LeaseExtended)
def _(state: ClusterState, event: ev.LeaseExtended, record: Record) -> None:
    lease = lease_of(state, event.lease_id)
    if not lease.expires_ns <= event.expires_ns <= lease.cap_ns:
        raise IllegalEvent(
            f"lease {lease.id} expires at {lease.expires_ns} and at {lease.cap_ns} at the"
            f" latest, not at {event.expires_ns}"
        )
    lease.bytes_moved, lease.expires_ns = event.bytes_moved, event.expires_ns
    state.touch("lease", lease.id)


@folds(ev.RequestMoving)
def _(state: ClusterState, event: ev.RequestMoving, record: Record) -> None:
    request = request_of(state, event.request_id)
    replica_of(state, event.replica, event.epoch)
    here = (request.source or request.target, request.source_epoch or request.target_epoch)
    if here != (event.replica, event.epoch) or request.lease_id:
        raise IllegalEvent(f"request {request.id} is not on {event.replica}/{event.epoch} alone")
    if event.step == "held":
        request.state = next_request_state(request.id, request.state, "held")
        request.source, request.source_epoch = request.target, request.target_epoch
        request.source_blocks = request.target_blocks
        request.target, request.target_epoch, request.target_blocks = "", 0, 0
        # Who failed to take it when it was prefilled may take it now.
        request.tried = ()
    elif event.step == "stays" and request.state is RequestState.MIGRATING:
        request.state = next_request_state(request.id, request.state, "stay")
        settle_down(request)
    request.moving = event.step
    state.touch("request", request.id)


@folds(ev.KvMismatched)
def _(state: ClusterState, event: ev.KvMismatched, record: Record) -> None:
    lease_of(state, event.lease_id)
    count(state, "kv_mismatches")


def _link_of(state: ClusterState, source: str, target: str) -> Link:
    link = state.links.get(link_key(source, target))
    if link is None:
        raise IllegalEvent(f"link {source}>{target} has no fault")
    return link


@folds(ev.LinkCooled)
def _(state: ClusterState, event: ev.LinkCooled, record: Record) -> None:
    replica_of(state, event.source, event.source_epoch)
    replica_of(state, event.target, event.target_epoch)
    link = Link(event.source, event.source_epoch, event.target, event.target_epoch)
    link = state.links.setdefault(link.key, link)
    link.faults += 1
    link.fault, link.reason, link.lease_id = event.fault, event.reason, event.lease_id
    link.cool_ns = event.until_ns
    count(state, "link_faults")
    state.touch("link", link.key)


@folds(ev.LinkReopened)
def _(state: ClusterState, event: ev.LinkReopened, record: Record) -> None:
    link = _link_of(state, event.source, event.target)
    if record.mono_ns < link.cool_ns:
        raise IllegalEvent(f"link {link.key} cools down until {link.cool_ns}")
    link.cool_ns = 0
    state.touch("link", link.key)


@folds(ev.LinkHealed)
def _(state: ClusterState, event: ev.LinkHealed, record: Record) -> None:
    link = _link_of(state, event.source, event.target)
    del state.links[link.key]
    state.touch("link", link.key)


@folds(ev.AuditOpened)
def _(state: ClusterState, event: ev.AuditOpened, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    replica.dirty_ns = max(1, record.mono_ns)
    state.touch("replica", replica.id)


@folds(ev.AuditPassed)
def _(state: ClusterState, event: ev.AuditPassed, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    replica.dirty_ns = replica.audits_failed = 0
    state.touch("replica", replica.id)


@folds(ev.AuditFailed)
def _(state: ClusterState, event: ev.AuditFailed, record: Record) -> None:
    replica = replica_of(state, event.replica, event.epoch)
    replica.dirty_ns = max(1, record.mono_ns)
    replica.audits_failed += 1
    count(state, "audits_failed")
    state.touch("replica", replica.id)


@folds(ev.InvariantBroken)
def _(state: ClusterState, event: ev.InvariantBroken, record: Record) -> None:
    count(state, "invariants_broken")
