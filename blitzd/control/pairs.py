"""Live pairs: a replica that serves while its weights arrive (New), and one that goes on with
what it cannot finish yet (Old).

*Prompts.* From its first word on New takes prompts like any prefill replica, a few at a time
(`Pair.cap_at`). Old takes none while New does: what it is to compute it takes over from New,
the earliest first, with the layers that New has run. A prompt given to Old directly would be
computed there from its first layer, before those that came earlier; so what is above New's cap
waits in the queue, as in the original (reference 2.2), and Old is never idle for it, since an
idle Old takes what New has. Old does take prompts until New can, and those that New refuses or
is too small for; no more at a time than New would, since it begins to follow when it has run
them.

*Who has a request.* From its grant on it names both (`source` and `rest`), and holds blocks on
both, since Old takes it over without asking. Each tells; the first word moves the request, the
second changes nothing. Whatever frees the request frees it on both.

*Ends.* New has all layers and nothing left that Old could take: both are Prefill. Old says so,
but only when it has nothing else to do; so what is known here of New's requests counts as well.
While Old cannot follow it is told again, `FOLLOW_TRIES` times; then the pair breaks, as it does
with the death of a side and the failure of the load. What New has then ends there with its last
layer, or goes back to the queue where somebody else can take it.
"""

import heapq

from blitzd.control.commands import CancelRequest, FollowLive, LoadModel
from blitzd.control.resume import resume
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Pair, Replica, ReplicaState, Request, RequestState

S = ReplicaState
FOLLOW_TRIES = 3
"""Of Old in one pair."""
HOLDINGS_NAMED = 64
"""Requests that a worker names among its holdings; with more some are missing there."""
Upstream = tuple[tuple[str, int], ...]


def open_pair(
    turn: Turn,
    new: Replica,
    old: Replica,
    upstream: Upstream,
    rung: str,
    skipped: tuple[tuple[str, str], ...] = (),
) -> None:
    """New begins to load from `upstream`, and serves."""
    sides = (new.id, new.epoch, old.id, old.epoch)
    cap, source = turn.policy.pair_cap, upstream[0][0]
    pair_id = turn.state.node.next_pair
    turn.emit(ev.PairOpened(pair_id, *sides, cap, source, upstream, rung, skipped))
    floor_ms = turn.policy.mock_transfer_ms
    turn.command(LoadModel(new.id, new.epoch, upstream, rung, floor_ms, live=True))


def may_be_old(replica: Replica) -> bool:
    """Whether it can finish for another: it serves, and is not about to go."""
    return (
        replica.state is S.PREFILL
        and not replica.cordoned
        and not replica.restart_epoch
        and not replica.stands_in
    )


class Olds:
    """Who can finish for another: one that feeds nobody if there is one, then the one with the
    fewest blocks reserved, then the smallest id. Ranked once for the loads that begin in a turn:
    there may be a thousand, and as many to choose from."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._ranked: list[tuple[bool, int, str]] | None = None
        self._feeding: set[str] = set()

    def feeds(self, replica_id: str) -> None:
        """From now on."""
        self._feeding.add(replica_id)

    def take(self) -> Replica | None:
        """The best; nobody else gets it."""
        if self._ranked is None:
            self._ranked = self._rank()
        while self._ranked:
            feeds, blocks, replica_id = heapq.heappop(self._ranked)
            if feeds or replica_id not in self._feeding:
                return self._turn.state.replicas[replica_id]
            heapq.heappush(self._ranked, (True, blocks, replica_id))
        return None

    def _rank(self) -> list[tuple[bool, int, str]]:
        state = self._turn.state
        feeding = state.feeding()
        ranked = [
            (replica.id in feeding, state.blocks_reserved(replica.id), replica.id)
            for replica in state.in_states(S.PREFILL, role="prefill")
            if may_be_old(replica)
        ]
        heapq.heapify(ranked)
        return ranked


def tend(turn: Turn) -> None:
    """Has Old follow, and settles pairs that are done."""
    for pair in list(turn.state.pairs.values()):
        new = turn.state.replicas[pair.new]
        if new.state is S.REFACTORY_PREFILL and (pair.drained or not _shares(turn, new)):
            turn.emit(ev.PairSettled(pair.id))
        elif pair.drained:
            continue
        elif new.blocks_total and not pair.following and turn.mono_ns >= pair.retry_ns:
            turn.emit(ev.FollowStarted(pair.id))
            sides = (pair.old, pair.old_epoch, pair.new, pair.new_epoch)
            turn.command(FollowLive(pair.id, *sides))


def _shares(turn: Turn, new: Replica) -> bool:
    """Whether New has anything left that Old could take."""
    on_new = turn.state.requests_on(new.id)
    return any(r.rest and r.state is RequestState.PREFILLING for r in on_new)


def follow_ended(turn: Turn, ended: ev.FollowEnded) -> None:
    if turn.current(ended.old, ended.old_epoch) is None:
        return
    pair = turn.state.pairs.get(ended.pair_id)
    if pair is None or not pair.following:
        turn.ignore(ended.old, ended.old_epoch)
        return
    wait_ms = turn.policy.resume_backoff_ms << pair.follow_faults if ended.fault else 0
    retry_ns = turn.mono_ns + wait_ms * MS if ended.fault else 0
    said = (ended.taken, ended.fault, ended.reason)
    turn.emit(ev.FollowStopped(pair.id, *said, retry_ns))
    if pair.follow_faults >= FOLLOW_TRIES:
        _give_up(turn, pair, f"{pair.old} could not follow {pair.new}: {ended.reason}")


def _give_up(turn: Turn, pair: Pair, reason: str) -> None:
    """Old is an ordinary replica again; so it can have what New would finish with its last
    layer only. What may not be computed again waits for that."""
    new = turn.state.replicas[pair.new]
    if new.state is S.NEW_PREFILL:
        for request in turn.state.requests_on(new.id):
            if request.state is RequestState.PREFILLING and request.resumable:
                on = (new.id, new.epoch)
                resume(turn, request, "handover_failed", on, reason, living=True)
    turn.emit(ev.PairBroken(pair.id, reason))


def restarted(turn: Turn) -> None:
    """At a boot: both sides of what is open still were adopted, and told to forget what they did
    for each other."""
    for pair_id in list(turn.state.pairs):
        turn.emit(ev.PairBroken(pair_id, "the daemon was restarted"))


# What the two say of requests.


def relayed(turn: Turn, said: ev.Relayed) -> None:
    replica = turn.current(said.replica, said.epoch)
    if replica is None:
        return
    request = turn.state.requests.get(said.request_id)
    on = (replica.id, replica.epoch)
    if request is None or request.resumes != said.attempt:
        _let_go(turn, replica, said)
    elif on not in request.on():
        turn.ignore(*on)
    elif request.state is not RequestState.PREFILLING:
        return  # the other of the two has said so
    elif request.rest:
        turn.emit(ev.RequestRelayed(request.id, said.layers))
    else:
        resume(turn, request, "worker_lost", on, "who went on with it is gone")


def _let_go(turn: Turn, replica: Replica, said: ev.Relayed) -> None:
    """It ended, or went on elsewhere, while it was handed over: the cancel may have come to Old
    before the request did."""
    turn.ignore(replica.id, replica.epoch)
    pair = turn.state.pairs.get(replica.pair_id)
    sides = {(replica.id, replica.epoch)}
    if pair is not None:
        sides |= {(pair.new, pair.new_epoch), (pair.old, pair.old_epoch)}
    for side in sorted(sides):
        turn.command(CancelRequest(*side, said.request_id, said.attempt))


def lost_on_the_way(turn: Turn, replica: Replica, report: ev.HoldingsReported) -> None:
    """Resumes what New has given away and Old has not got: New's answer to its word that it has
    the request did not reach Old, which let go of it then."""
    if len(report.held) >= HOLDINGS_NAMED:
        return
    held, on = set(report.held), (replica.id, replica.epoch)
    for request in turn.state.requests_on(replica.id):
        if _is_missing(turn, request, on) and (request.id, request.resumes) not in held:
            reason = "its hand-over to there was never confirmed"
            resume(turn, request, "handover_failed", on, reason, living=True)


def _is_missing(turn: Turn, request: Request, on: tuple[str, int]) -> bool:
    """Unless it is named. It may be about to come, or just about to end."""
    if request.state is not RequestState.RELAYED or request.runner != on:
        return False
    return turn.mono_ns >= request.relayed_ns + turn.policy.audit_grace_ms * MS
