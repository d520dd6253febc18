"""What the planner knows of the past: demand that came, rates that were reached, and how
long a role has been idle. Folded from events, so that nothing is missed between two looks
(a request that comes and goes between two samples was demand too)."""

import msgspec

BUCKETS = 10
"""Parts of the window over which arrivals are averaged."""
REMEMBERED_NS = 4 * 10**9
"""Work is halved, with what it made, once there is so much: the rate follows the load."""
EVIDENCE_NS = 250_000_000
"""Of work, before its rate is believed: the first steps of a worker are slow."""


class Work(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens, and the time that one replica was busy with them."""

    tokens: int = 0
    busy_ns: int = 0

    def with_more(self, tokens: int, busy_ns: int) -> "Work":
        tokens, busy_ns = self.tokens + tokens, self.busy_ns + busy_ns
        if busy_ns >= REMEMBERED_NS:
            return Work(tokens // 2, busy_ns // 2)
        return Work(tokens, busy_ns)

    def per_s(self) -> int:
        """Tokens per second of one replica; 0 while there is too little to tell."""
        return self.tokens * 10**9 // self.busy_ns if self.busy_ns >= EVIDENCE_NS else 0


class Wait(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What the planner last said of a role."""

    verdict: str = ""
    since_ns: int = 0
    """Since when the verdict is this one."""
    peak: int = 0
    """The most replicas that the load would have allowed meanwhile."""


class Plan(msgspec.Struct, omit_defaults=True):
    """Of the whole cluster, under the key 0 of its table."""

    prefill: Wait = Wait()
    decode: Wait = Wait()
    decided_ns: int = 0
    """When counts were last changed by the planner."""
    held_ns: int = 0
    """When a wait was last recorded."""
    seq: int = 0
    """The last record of the planner; its numbers are those below."""
    inputs: dict[str, int] = {}
    terms: dict[str, int] = {}
    clamps: tuple[str, ...] = ()
    pinned: int = 0
    """1: an operator's counts hold."""
    pinned_ns: int = 0
    hold_ns: int = 0
    """For how long; 0: until they are released."""
    arrivals: tuple[tuple[int, int], ...] = ()
    """(bucket of time, prompt tokens that came in it), the newest last."""
    bucket_ns: int = 0
    prefilled: Work = Work()
    moved: Work = Work()

    def arrived(self, tokens: int, now_ns: int, bucket_ns: int) -> None:
        if bucket_ns != self.bucket_ns:
            self.arrivals, self.bucket_ns = (), bucket_ns
        bucket = now_ns // bucket_ns
        *before, last = self.arrivals or ((bucket, 0),)
        if last[0] == bucket:
            last = (bucket, last[1] + tokens)
        else:
            before = [b for b in (*before, last) if b[0] > bucket - BUCKETS]
            last = (bucket, tokens)
        self.arrivals = (*before, last)

    def arrival_rate(self, now_ns: int) -> int:
        """Prompt tokens per second, over the last buckets and the one that has begun."""
        if not self.bucket_ns:
            return 0
        newest, into = divmod(now_ns, self.bucket_ns)
        came = sum(tokens for bucket, tokens in self.arrivals if bucket > newest - BUCKETS)
        return came * 10**9 // ((BUCKETS - 1) * self.bucket_ns + into)

    def restart(self, now_ns: int) -> None:
        """The core's clock starts again: what was measured with the last one is void."""
        self.prefill, self.decode = Wait(), Wait()
        self.decided_ns = self.held_ns = 0
        self.arrivals = ()
        if self.pinned:
            self.pinned_ns = now_ns
