"""The request machine: queued, prefilling, migrating, decoding, then exactly one end.

On a replica that serves while it loads a prefill may be `relayed`: another replica, its pair,
goes on with it. Either may make the first token.

`migrating` begins with the first token: from then on the request waits for, or has, a KV
lease towards a decode replica. When what was computed is lost, a request is `queued` again
and goes on after the tokens that its client has got. It may end from any state before its
end, since a client may leave at any time.
"""

from enum import StrEnum

from blitzd.fsm.table import IllegalTransition


class RequestState(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    RELAYED = "relayed"
    MIGRATING = "migrating"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


R = RequestState

ENDS = frozenset({R.FINISHED, R.FAILED, R.CANCELLED, R.REJECTED})

NEXT: dict[tuple[RequestState, str], RequestState] = {
    (R.QUEUED, "prefill"): R.PREFILLING,
    (R.PREFILLING, "relay"): R.RELAYED,
    (R.PREFILLING, "first_token"): R.MIGRATING,
    (R.RELAYED, "first_token"): R.MIGRATING,
    (R.MIGRATING, "arrived"): R.DECODING,
    # It goes on elsewhere: its replica shuts.
    (R.DECODING, "held"): R.MIGRATING,
    # Decoded where it was prefilled: on a colocated replica, or one that changes its role.
    (R.PREFILLING, "stay"): R.DECODING,
    (R.MIGRATING, "stay"): R.DECODING,
    # A request may end with its first token; none ends before it was computed.
    (R.PREFILLING, "finish"): R.FINISHED,
    (R.RELAYED, "finish"): R.FINISHED,
    (R.DECODING, "finish"): R.FINISHED,
    # A live replica does not take it; another will.
    (R.PREFILLING, "return"): R.QUEUED,
    (R.PREFILLING, "resume"): R.QUEUED,
    (R.RELAYED, "resume"): R.QUEUED,
    (R.MIGRATING, "resume"): R.QUEUED,
    (R.DECODING, "resume"): R.QUEUED,
    **{
        (state, trigger): end
        for state in (R.QUEUED, R.PREFILLING, R.RELAYED, R.MIGRATING, R.DECODING)
        for trigger, end in (("fail", R.FAILED), ("cancel", R.CANCELLED))
    },
}


def next_request_state(request_id: int, state: RequestState, trigger: str) -> RequestState:
    """The state that follows. Raises IllegalTransition."""
    try:
        return NEXT[state, trigger]
    except KeyError:
        accepted = [known for source, known in NEXT if source is state]
        raise IllegalTransition(f"request {request_id}", state, trigger, accepted) from None
