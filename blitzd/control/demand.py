"""What the planner decides on: who is there, what they have to do, how fast they are.

All of it is read from the folded state, never from what the planner wrote before, so that
replicas that died, were drained by hand or never came up are not counted on.
"""

from collections import Counter

import msgspec

from blitzd.control.policy import Policy
from blitzd.fsm import ClusterState, RequestState
from blitzd.fsm.standing import standings


class Inputs(msgspec.Struct, frozen=True):
    """Replicas, tokens, tokens per second and KV blocks; none is negative."""

    prefill_ready: int = 0
    prefill_loading: int = 0
    """On the way to serve: loading, mutating, or about to."""
    prefill_dead: int = 0
    """Failed; they come back if they can, but nobody knows when."""
    prefill_draining: int = 0
    """They finish what they have, and may be revived."""
    decode_ready: int = 0
    decode_loading: int = 0
    decode_dead: int = 0
    decode_draining: int = 0
    spare: int = 0
    """Replicas that could be given a role now."""
    waiting_tokens: int = 0
    """Prompt tokens of accepted requests whose first token is not out."""
    arrival_rate: int = 0
    """Prompt tokens per second."""
    prefill_rate: int = 0
    """Prompt tokens per second of one replica; 0: not known yet."""
    kv_blocks: int = 0
    """In use, reserved, or needed by KV that waits for a place."""
    coming_blocks: int = 0
    """What the requests that are not prefilled yet will need."""
    blocks_per_replica: int = 0
    """KV blocks of a decode replica; 0: not known yet."""
    moving_tokens: int = 0
    """Prompt tokens of KV on its way, or waiting for it."""
    transfer_rate: int = 0
    """Prompt tokens per second into one decode replica; 0: not known yet."""

    @property
    def prefill(self) -> int:
        """Replicas that can be counted on, now or soon."""
        return self.prefill_ready + self.prefill_loading

    @property
    def decode(self) -> int:
        return self.decode_ready + self.decode_loading

    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(msgspec.structs.asdict(self).items()))


def observe(state: ClusterState, policy: Policy, now_ns: int) -> Inputs:
    """Costs the same for any number of replicas and requests."""
    index, plan = state.index, state.plan
    there = standings(state)
    waiting = RequestState.QUEUED, RequestState.PREFILLING, RequestState.RELAYED
    waiting_tokens = sum(index.tokens[s] for s in waiting)
    waiting_requests = sum(index.requests[s] for s in waiting)
    block_tokens = max(index.block_sizes, default=0) or 1
    reserve_blocks = -(-policy.decode_reserve_tokens // block_tokens)
    return Inputs(
        prefill_ready=there["prefill", "ready"],
        prefill_loading=there["prefill", "loading"],
        prefill_dead=there["prefill", "dead"],
        prefill_draining=there["prefill", "draining"],
        decode_ready=there["decode", "ready"],
        decode_loading=there["decode", "loading"],
        decode_dead=there["decode", "dead"],
        decode_draining=there["decode", "draining"],
        spare=there["spare", "free"],
        waiting_tokens=waiting_tokens,
        arrival_rate=plan.arrival_rate(now_ns),
        prefill_rate=policy.prefill_tokens_per_s or plan.prefilled.per_s(),
        kv_blocks=index.kv_blocks + index.unplaced_blocks + len(index.unplaced) * reserve_blocks,
        coming_blocks=-(-waiting_tokens // block_tokens) + waiting_requests * reserve_blocks,
        blocks_per_replica=_mean(index.kv_sizes),
        moving_tokens=index.tokens[RequestState.MIGRATING],
        transfer_rate=policy.transfer_tokens_per_s or plan.moved.per_s(),
    )


def _mean(sizes: Counter[int]) -> int:
    sized = {size: count for size, count in sizes.items() if size}
    count = sum(sized.values())
    return sum(size * n for size, n in sized.items()) // count if count else 0
