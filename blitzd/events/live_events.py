"""Live pairs at work: what the two workers say (inputs 45-49).

A pair opens, settles and breaks by `PairOpened`, `PairSettled` and `PairBroken`. In between New
is granted prompts, runs their layers as these arrive, and Old takes them over one by one; both
tell of it, in whatever order.
"""

from blitzd.events.record import Kind, Payload, record_type


@record_type(45, Kind.INPUT)
class Relayed(Payload, frozen=True, array_like=True):
    """Old goes on with a request that New began (StepReport.relayed_ids). New says so when it
    has given it away, Old with its first token, right before that; either may come first, and
    the second changes nothing. Of a request that Old took with no layer done only New says it.
    Told whatever became of the request: of one that is over both are made to let go."""

    replica: str
    """Who says it, New or Old, and its epoch."""
    epoch: int
    request_id: int
    attempt: int
    """Resumes of the request before the attempt that it is about."""
    layers: int
    """That ran on New: their KV is there, that of the others on Old."""


@record_type(46, Kind.INPUT)
class FollowEnded(Payload, frozen=True, array_like=True):
    """Old takes over nothing more from New (the answer to FollowLive, or its absence). What it
    has taken over goes on there."""

    pair_id: int
    old: str
    old_epoch: int
    taken: int
    """Requests, if the worker has said so."""
    fault: str = ""
    """Empty: New has all layers and nothing left that Old could take. Else as in ImportEnded."""
    reason: str = ""
