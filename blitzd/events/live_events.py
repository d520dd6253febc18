"""Live pairs at work: what the two workers say (inputs 45-49), and what follows (190-199).

A pair opens, settles and breaks by `PairOpened`, `PairSettled` and `PairBroken`. In between New
is granted prompts, runs their layers as these arrive, and Old takes them over one by one; both
tell of it, in whatever order.
"""

from blitzd.events.record import Durability, Kind, Payload, record_type


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


@record_type(190, Kind.EVENT)
class RequestRelayed(Payload, frozen=True, array_like=True):
    """The paired replica goes on with the request: layers [0, `layers`) ran on its source and
    their KV stays there. 0: none did, and the source has nothing of it any more."""

    request_id: int
    layers: int


@record_type(191, Kind.EVENT)
class RequestReturned(Payload, frozen=True, array_like=True):
    """A replica that serves while it loads does not take this request, and nobody is to blame:
    it is queued again, at its old place, for one that has all layers."""

    request_id: int
    replica: str
    epoch: int
    reason: str


@record_type(192, Kind.EVENT, Durability.ACK)
class FollowStarted(Payload, frozen=True, array_like=True):
    """Old is told to take over from New, which can be given prompts from here on."""

    pair_id: int


@record_type(193, Kind.EVENT)
class FollowStopped(Payload, frozen=True, array_like=True):
    """Old takes over nothing more. Without a fault the pair settles once New's load has ended;
    with one Old is told again from `retry_ns` on."""

    pair_id: int
    taken: int
    fault: str
    reason: str
    retry_ns: int
