"""What virtual workers are given to do."""

from blitzd.node.live import LiveRequest
from blitzd.node.wire_ids import wire_id


def token_at(seed: int, position: int) -> int:
    return (seed * 1_000_003 + position * 7919) % 50_000


class Job:
    """A request as it goes over the wire: what the client has got by then is fixed."""

    def __init__(self, live: LiveRequest) -> None:
        self.id = wire_id(live.request_id, live.attempt)
        self.seed = live.seed
        self.prompt = len(live.request.prompt_tokens)
        self.sent = len(live.output)
        self.max_tokens = live.request.max_tokens
