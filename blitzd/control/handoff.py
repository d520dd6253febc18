"""Moving requests that decode off a replica that shuts, by their KV.

A move takes tens of milliseconds, what is left to decode takes a token time a token, so a
request moves when more than `move_min_tokens` may be left and another replica has the room now.
It stops after its next token, its KV gets a lease like any other, and its tokens go on there.
If no lease comes of it, it goes on where it was, and is not asked again.
"""

from blitzd.control.commands import DecodeLocally, HoldDecode
from blitzd.control.offers import best_decode
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.fsm import ReplicaState, Request, RequestState


def move(turn: Turn) -> None:
    """Asks those that may go on elsewhere to stop, a few of each replica at a time."""
    if not turn.policy.move_min_tokens or turn.state.node.phase != "running":
        return
    for replica in turn.state.in_states(ReplicaState.SHUTTING_DECODE):
        here = turn.state.requests_on(replica.id)
        under_way = sum(request.moving in ("asked", "held") for request in here)
        for request in here:
            if under_way >= turn.policy.max_imports_per_replica:
                break
            if (
                request.state is RequestState.DECODING
                and not request.moving
                and best_decode(turn.state, turn.policy, request) is not None
            ):
                under_way += _ask(turn, request)


def _ask(turn: Turn, request: Request) -> bool:
    """Either way it is decided once, since what the client has got is in no other event."""
    on = (request.target, request.target_epoch)
    sent = turn.sent(request.id)
    asked = request.max_tokens - sent > turn.policy.move_min_tokens
    turn.emit(ev.RequestMoving(request.id, *on, "asked" if asked else "stays", sent))
    if asked:
        turn.command(HoldDecode(*on, request.id, request.resumes))
    return asked


def decode_held(turn: Turn, held: ev.DecodeHeld) -> None:
    if turn.current(held.replica, held.epoch) is None:
        return
    request = turn.state.requests.get(held.request_id)
    on = (held.replica, held.epoch)
    if request is None or request.moving != "asked" or on != (request.target, request.target_epoch):
        turn.ignore(*on)
        return
    turn.emit(ev.RequestMoving(request.id, *on, "held"))


def stay(turn: Turn, request: Request) -> None:
    """No lease came of it: it goes on where its KV is."""
    on = (request.source, request.source_epoch)
    turn.emit(ev.RequestMoving(request.id, *on, "stays"))
    turn.command(DecodeLocally(*on, request.id, request.resumes))
