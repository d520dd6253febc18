"""Live pairs: what their two workers say of them."""

from blitzd.control.turn import Turn
from blitzd.events import types as ev


def relayed(turn: Turn, said: ev.Relayed) -> None:
    if turn.current(said.replica, said.epoch) is not None:
        turn.ignore(said.replica, said.epoch)


def follow_ended(turn: Turn, ended: ev.FollowEnded) -> None:
    if turn.current(ended.old, ended.old_epoch) is not None:
        turn.ignore(ended.old, ended.old_epoch)
