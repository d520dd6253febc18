"""Hand-overs of KV: who gets a lease, how long it lives, and what its end says of the link.

A lease is a deadline that progress moves: each word of the importing worker that it gets on
extends it by `lease_stall_ms`, up to a cap. What ends it is an input: the worker's own word,
the worker's death, or time. Whatever comes later finds no lease; it is counted, and
changes nothing.

A transfer that broke says something about the link between the two workers, so nothing goes
over it for a while, which doubles with each failure in a row. Then one hand-over at a time
tries it, and the first that succeeds heals it. A request whose links are all cooling waits,
since the KV is where it was; or it is computed again where the links are better.
"""

from blitzd.control import handoff
from blitzd.control.commands import ImportKv, ReleaseKv
from blitzd.control.offers import best_decode, cut_off, has_failed, worst_link
from blitzd.control.resume import hand_over_failed, resume, targets_exhausted
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Lease, Link, ReplicaState, Request
from blitzd.fsm.link import link_key

LINK_FAULTS = frozenset({"source", "stalled", "corrupt", "deadline", "target", "mismatch"})
"""Those that the next hand-over between the same two workers may meet again."""


def start_migration(turn: Turn, request: Request) -> bool:
    """Gives the request a lease. False: it waits, and those behind it wait with it."""
    offer = best_decode(turn.state, turn.policy, request)
    if offer is None and request.moving:
        handoff.stay(turn, request)
        return True
    if offer is None:
        return _without_target(turn, request)
    policy, chosen = turn.policy, offer.replica
    lease_id = turn.state.node.next_lease
    cap_ms = policy.lease_ttl_ms
    stall_ms = min(policy.lease_stall_ms, cap_ms)
    expires_ns, cap_ns = (turn.mono_ns + ms * MS for ms in (stall_ms, cap_ms))
    hop = (request.source, request.source_epoch, chosen.id, chosen.epoch)
    rest, rest_epoch, split = request.rest, request.rest_epoch, request.split_layer
    booked = (offer.blocks, expires_ns, cap_ns)
    turn.emit(ev.MigrationStarted(lease_id, request.id, *hop, *booked, rest, rest_epoch, split))
    every = policy.kv_checksum_every
    verify = every > 0 and lease_id % every == 0
    # The worker gives up a little earlier, since it can say what it waited for.
    limits = (stall_ms * 3 // 4, cap_ms)
    checked = (verify, request.resumes)
    turn.command(ImportKv(lease_id, request.id, *hop, *limits, *checked, rest, rest_epoch, split))
    return True


def _without_target(turn: Turn, request: Request) -> bool:
    """What some targets have failed to take, or have no link to take by, is nothing to those
    behind it."""
    state = turn.state
    targets = [state.replicas[replica_id] for replica_id in state.index.acceptors]
    if not targets:
        return False
    if all(has_failed(request, target) for target in targets):
        targets_exhausted(turn, request)
        return True
    links = [worst_link(state, request, target.id) for target in targets]
    if any(link is None for link in links):
        return bool(request.tried)
    cool_ns = min(link.cool_ns for link in links if link is not None)
    too_long = cool_ns > turn.mono_ns + turn.policy.link_wait_ms * MS
    # What may not be computed again waits: its KV is whole, and a link may heal.
    if too_long and request.resumable and _better_source(turn, request):
        reason = f"its links to {', '.join(target.id for target in targets)} are down"
        on = (request.source, request.source_epoch)
        resume(turn, request, "links_down", on, reason)
    return True


def _better_source(turn: Turn, request: Request) -> bool:
    """Whether some other replica could compute it and hand it on, or keep it."""
    return any(
        replica_id != request.source and not cut_off(turn.state, turn.state.replicas[replica_id])
        for replica_id in turn.state.index.takers
    )


def import_progressed(turn: Turn, progress: ev.ImportProgressed) -> None:
    lease = turn.state.leases.get(progress.lease_id)
    if lease is None:
        turn.ignore("", 0)
        return
    expires_ns = min(turn.mono_ns + turn.policy.lease_stall_ms * MS, lease.cap_ns)
    if expires_ns > lease.expires_ns:
        turn.emit(ev.LeaseExtended(lease.id, progress.bytes_moved, expires_ns))


def import_ended(turn: Turn, ended: ev.ImportEnded) -> None:
    lease = turn.state.leases.get(ended.lease_id)
    if lease is None:
        # Cancelled meanwhile, or the first decoded token came before this answer.
        turn.ignore("", 0)
        return
    request = turn.state.requests[lease.request_id]
    if not ended.fault:
        arrived(turn, request, ended.bytes_moved, ended.elapsed_ns)
    elif ended.fault == "no_room":
        retry_ns = turn.mono_ns + turn.policy.import_retry_ms * MS
        turn.emit(ev.MigrationFailed(lease.id, ended.fault, ended.reason, retry_ns))
    else:
        if ended.fault == "corrupt":
            sums = (ended.source_checksum, ended.target_checksum)
            turn.emit(ev.KvMismatched(lease.id, ended.layer, *sums))
        _fail(turn, lease, ended.fault, ended.reason)


def arrived(turn: Turn, request: Request, bytes_moved: int, elapsed_ns: int) -> None:
    """The target has the KV: it said so, or made a token with it."""
    lease = turn.state.leases[request.lease_id]
    turn.emit(ev.MigrationFinished(lease.id, bytes_moved, elapsed_ns))
    for source, epoch in _sources(lease):
        turn.command(ReleaseKv(source, epoch, request.id, request.resumes))
        link = turn.state.links.get(link_key(source, lease.target))
        if link is not None:
            turn.emit(ev.LinkHealed(link.source, link.target, lease.id))


def _sources(lease: Lease) -> list[tuple[str, int]]:
    """Who gives the KV, or the halves of it."""
    halves = [(lease.source, lease.source_epoch), (lease.rest, lease.rest_epoch)]
    return [half for half in halves if half[0]]


def _fail(turn: Turn, lease: Lease, fault: str, reason: str) -> None:
    if fault in LINK_FAULTS:
        # Of two halves nobody knows over which link it broke.
        for source in _sources(lease):
            _cool(turn, lease, source, fault, reason)
    hand_over_failed(turn, turn.state.requests[lease.request_id], fault, reason)


def _cool(turn: Turn, lease: Lease, source: tuple[str, int], fault: str, reason: str) -> None:
    known = turn.state.links.get(link_key(source[0], lease.target))
    if known is not None and known.cool_ns:
        # Transfers that ran at the same time broke together: that is one failure.
        return
    faults = known.faults if known is not None else 0
    cool_ms = min(turn.policy.link_cooldown_ms << min(faults, 16), turn.policy.link_cooldown_max_ms)
    if fault == "mismatch":
        cool_ms = turn.policy.link_cooldown_max_ms
    ends = (*source, lease.target, lease.target_epoch)
    until_ns = turn.mono_ns + cool_ms * MS
    turn.emit(ev.LinkCooled(*ends, lease.id, fault, reason, until_ns))


def expire(turn: Turn) -> None:
    """What time does to leases and links."""
    for lease in list(turn.state.leases.values()):
        if turn.mono_ns < lease.expires_ns:
            continue
        took_ms = (turn.mono_ns - lease.opened_ns) // MS
        if lease.cap_ns and lease.expires_ns < lease.cap_ns:
            reason = f"{lease.target} did not get on: {lease.bytes_moved} bytes in {took_ms} ms"
            _fail(turn, lease, "stalled", reason)
        else:
            _fail(turn, lease, "deadline", f"not there after {took_ms} ms")
    for link in [k for k in turn.state.links.values() if _is_cool(turn, k)]:
        turn.emit(ev.LinkReopened(link.source, link.target))


def _is_cool(turn: Turn, link: Link) -> bool:
    return 0 < link.cool_ns <= turn.mono_ns


def _keeps_its_role(turn: Turn, replica_id: str) -> bool:
    return turn.state.replicas[replica_id].state is not ReplicaState.MUTATING_TO_DECODE


def dispatch(turn: Turn) -> None:
    """Gives leases to those whose prompt is computed, in order of arrival."""
    for request_id in list(turn.state.index.unplaced):
        request = turn.state.requests[request_id]
        if (
            turn.mono_ns >= request.retry_ns
            # One that changes its role keeps what it has, without a transfer; not half of it.
            and (request.rest or _keeps_its_role(turn, request.source))
            and not start_migration(turn, request)
        ):
            # First come, first served here too: a large one would wait for ever otherwise.
            break
