"""What becomes of a request when its worker, or the way to it, is lost.

While the source of a hand-over still has the KV, the request stays there and another target
is asked. Otherwise it is queued again, at its old place, to be computed anew from its prompt
and the tokens that its client has got; since a token depends on those before it and on its
position alone, the client's stream goes on as if nothing had happened.

A request that takes its worker down with it must not take down every worker: after
`max_resumes` losses in a row without a new token in between it fails. One that moves on may
be resumed as often as its deadline allows, and at most `MAX_ATTEMPTS` times.
"""

from blitzd.control.commands import MAX_ATTEMPTS, CancelRequest
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Loss, Replica, Request, RequestState

REASON_CHARS = 200
WITHOUT_KV = ("not_held",)
"""Faults of a hand-over after which the source cannot serve another target either."""


def fail(turn: Turn, request: Request, code: str, reason: str) -> None:
    """Ends `request` with an error, freeing what it holds on replicas that live."""
    free(turn, request)
    turn.emit(ev.RequestFailed(request.id, code, reason, turn.sent(request.id)))


def free(turn: Turn, request: Request) -> None:
    for replica, epoch in request.on():
        turn.command(CancelRequest(replica, epoch, request.id, request.resumes))


def leave(turn: Turn, replica: Replica, cause: str, reason: str) -> None:
    """Takes every request off a replica that is lost, or has to be empty now."""
    for request in turn.state.requests_on(replica.id):
        if request.lease_id and request.target == replica.id:
            hand_over_failed(turn, request, "target", reason)
        elif request.state is RequestState.PREFILLING and request.rest == replica.id:
            continue  # its source has it, or will say who took it over
        else:
            resume(turn, request, cause, (replica.id, replica.epoch), reason)


def hand_over_failed(turn: Turn, request: Request, fault: str, reason: str) -> None:
    """While the source has the KV, dispatch asks another target for it."""
    cancel = CancelRequest(request.target, request.target_epoch, request.id, request.resumes)
    turn.command(cancel)
    # A time of 0 would mean never.
    retry_ns = 0 if fault in WITHOUT_KV else max(1, turn.mono_ns)
    turn.emit(ev.MigrationFailed(request.lease_id, fault, reason, retry_ns))
    if fault in WITHOUT_KV:
        on = (request.source, request.source_epoch)
        resume(turn, request, "handover_failed", on, reason, living=True)


def resume(
    turn: Turn,
    request: Request,
    cause: str,
    on: tuple[str, int],
    reason: str,
    *,
    living: bool = False,
) -> None:
    """Queues the request again, or fails it if it may not be. `on` is where it was lost;
    when that replica is `living`, it may still be dying, so the request waits a little."""
    if not request.resumable:
        fail(turn, request, cause, f"lost on {Loss(*on, reason)}")
        return
    sent = max(turn.sent(request.id), request.output_tokens)
    losses = request.losses if sent == request.output_tokens else ()
    if len(losses) >= turn.policy.max_resumes or request.resumes + 1 >= MAX_ATTEMPTS:
        places = ", ".join(map(str, (*losses, Loss(*on, reason))))
        attempts = f"{request.resumes + 1} attempts; without a new token lost on {places}"
        fail(turn, request, "resumes_exhausted", attempts)
        return
    free(turn, request)
    retry_ns = turn.mono_ns + (_wait_ms(turn, len(losses)) if living else 0) * MS
    why = reason[:REASON_CHARS]
    turn.emit(ev.RequestResumed(request.id, cause, why, *on, sent, retry_ns))


def _wait_ms(turn: Turn, losses: int) -> int:
    """Bounded: an operator may allow hundreds of losses in a row."""
    least = turn.policy.resume_backoff_ms
    return min(least << min(losses, 16), max(least, turn.policy.restart_backoff_max_ms))


def targets_exhausted(turn: Turn, request: Request) -> None:
    """Resumes a request whose KV every target has failed to take."""
    replica, _, epoch = request.tried[-1].rpartition("/")
    reason = f"its KV could not be handed to {', '.join(request.tried)}"
    resume(turn, request, "handover_failed", (replica, int(epoch)), reason, living=True)
