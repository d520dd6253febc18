"""Decisions about requests: admission, dispatch, hand-over, their ends (what is lost: `resume`).

Queued work stays with the daemon. A prefill replica is granted a few requests at a time;
a decode replica gets one when its blocks have been reserved, in the event that decides.
"""

from blitzd.control.commands import CancelRequest, StartPrefill
from blitzd.control.leases import arrived
from blitzd.control.offers import best_prefill
from blitzd.control.resume import REASON_CHARS, fail, free, resume
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import ReplicaState, Request, RequestState
from blitzd.fsm.index import BEING_PREFILLED

S = ReplicaState


def request_arrived(turn: Turn, arrived: ev.RequestArrived) -> None:
    refusal = _refusal(turn, arrived)
    if refusal:
        turn.emit(ev.RequestRejected(arrived.request_id, *refusal))
        return
    turn.emit(
        ev.RequestAccepted(
            arrived.request_id,
            arrived.prompt_tokens,
            arrived.max_tokens,
            arrived.seed,
            arrived.deadline_ns,
            arrived.resumable,
        )
    )


def _refusal(turn: Turn, arrived: ev.RequestArrived) -> tuple[str, str] | None:
    if turn.state.node.phase != "running":
        return "draining", "the server is shutting down and takes no new requests"
    waiting = len(turn.state.index.queued)
    if waiting >= turn.policy.max_queued_requests:
        return "queue_full", f"{waiting} requests are waiting, which is the limit"
    too_long = _too_long(turn, arrived.prompt_tokens, arrived.max_tokens)
    return ("too_long", too_long) if too_long else None


def _too_long(turn: Turn, prompt_tokens: int, max_tokens: int, output_tokens: int = 0) -> str:
    """Why it can never be served by those that serve now; empty: it can, or none serves."""
    index = turn.state.index
    for role, room in (("prefill", index.prompt_room.most()), ("decode", index.kv_room.most())):
        # A request ends at max_tokens without computing KV for its last token.
        wanted = prompt_tokens + (max_tokens - 1 if role == "decode" else output_tokens)
        if room is not None and wanted > room:
            return f"{wanted} tokens do not fit a {role} replica's {room}"
    return ""


def client_left(turn: Turn, left: ev.ClientLeft) -> None:
    request = turn.state.requests.get(left.request_id)
    if request is not None:
        free(turn, request)
        turn.emit(ev.RequestCancelled(request.id, "the client left"))


def first_token_produced(turn: Turn, produced: ev.FirstTokenProduced) -> None:
    """The first token that a replica made of this attempt."""
    if turn.current(produced.replica, produced.epoch) is None:
        return
    request = turn.state.requests.get(produced.request_id)
    on = (produced.replica, produced.epoch)
    if request is None:
        turn.ignore(*on)
        return
    if _computes(request, on):
        turn.emit(ev.PrefillFinished(request.id, stays=1 - produced.held))
    elif request.state is RequestState.MIGRATING and on == (request.target, request.target_epoch):
        # It decodes, though its answer to the import has not been read.
        arrived(turn, request, 0, 0)
    else:
        turn.ignore(*on)


def _computes(request: Request, on: tuple[str, int]) -> bool:
    """Whether the word of a token from there is of its prefill."""
    return request.state in BEING_PREFILLED and on == request.runner


def generation_ended(turn: Turn, ended: ev.GenerationEnded) -> None:
    if turn.current(ended.replica, ended.epoch) is None:
        return
    request = turn.state.requests.get(ended.request_id)
    on = (ended.replica, ended.epoch)
    if request is None:
        turn.ignore(*on)
        return
    if _computes(request, on):
        if request.split_layer:  # the other half is not wanted any more
            source = (request.source, request.source_epoch)
            turn.command(CancelRequest(*source, request.id, request.resumes))
        _finish(turn, ended)
    elif on == (request.target, request.target_epoch):
        if request.state is RequestState.MIGRATING:
            # The worker decoded to the end before its answer to the import was read.
            arrived(turn, request, 0, 0)
        _finish(turn, ended)
    else:
        turn.ignore(*on)


def _finish(turn: Turn, ended: ev.GenerationEnded) -> None:
    turn.emit(
        ev.RequestFinished(ended.request_id, ended.finish, ended.output_tokens, ended.output_digest)
    )


def request_errored(turn: Turn, errored: ev.RequestErrored) -> None:
    if turn.current(errored.replica, errored.epoch) is None:
        return
    request = turn.state.requests.get(errored.request_id)
    on = (errored.replica, errored.epoch)
    if request is None or errored.attempt != request.resumes or on not in request.on():
        turn.ignore(*on)
        return
    if errored.lost:
        resume(turn, request, "engine_error", on, errored.reason, living=True)
    elif _by_a_live_one(turn, request, on):
        reason = errored.reason[:REASON_CHARS]
        turn.emit(ev.RequestReturned(request.id, *on, reason))
    else:
        fail(turn, request, "engine_error", f"replica {errored.replica}: {errored.reason}")


def _by_a_live_one(turn: Turn, request: Request, on: tuple[str, int]) -> bool:
    """Whether it was refused by one that loads still, or did when it was asked: what that one
    does not take a replica with all layers may."""
    if request.state is not RequestState.PREFILLING or on != request.runner:
        return False
    return bool(request.rest) or turn.state.replicas[on[0]].state is S.NEW_PREFILL


def tokens_outdated(turn: Turn, outdated: ev.TokensOutdated) -> None:
    turn.ignore(outdated.replica, outdated.epoch)


def expire(turn: Turn) -> None:
    """Ends requests past their deadlines."""
    for request in list(turn.state.requests.values()):
        if request.deadline_ns and turn.mono_ns >= request.deadline_ns:
            waited_ms = (turn.mono_ns - request.arrived_ns) // MS
            where = request.state.value
            fail(turn, request, "deadline", f"still {where} after {waited_ms} ms")


def dispatch(turn: Turn) -> None:
    """Grants queued requests to prefill replicas."""
    for request in list(turn.state.queued()):
        if turn.mono_ns < request.retry_ns:
            continue
        # It may have come before anybody knew how much room there would be.
        too_long = _too_long(turn, request.prompt_tokens, request.max_tokens, request.output_tokens)
        if too_long:
            fail(turn, request, "too_long", too_long)
        elif not _start_prefill(turn, request):
            # First come, first served: nobody overtakes the one that does not fit yet.
            break


def _start_prefill(turn: Turn, request: Request) -> bool:
    offer = best_prefill(turn.state, turn.policy, request, turn.mono_ns)
    if offer is None:
        return False
    chosen, blocks, rest = offer.replica, offer.blocks, offer.rest
    shared = (rest.id, rest.epoch, offer.rest_blocks) if rest is not None else ()
    turn.emit(ev.PrefillStarted(request.id, chosen.id, chosen.epoch, blocks, *shared))
    # With a single token to make there is nothing to hand over.
    hands_over = request.max_tokens > request.output_tokens + 1
    hold = chosen.state is S.NEW_PREFILL or (chosen.state is not S.COLOCATED and hands_over)
    turn.command(StartPrefill(chosen.id, chosen.epoch, request.id, hold, request.resumes))
    return True
