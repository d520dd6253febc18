"""What each replica offers a request: the facts that dispatch decides on, and that
`blitzd replay --plan` shows."""

from collections.abc import Iterable
from typing import NamedTuple

from blitzd.control.policy import Policy
from blitzd.fsm import ClusterState, Replica, ReplicaState, Request, RequestState
from blitzd.fsm.table import ACCEPTS_KV

TAKES_PROMPTS = (ReplicaState.PREFILL, ReplicaState.COLOCATED)


class Offer(NamedTuple):
    replica: Replica
    blocks: int
    """What would be reserved there."""
    free: int
    """Blocks that are not reserved."""
    granted: int
    """Requests being prefilled there."""
    load: int
    """The smallest is taken, then the smallest id: prompt tokens being prefilled there, or
    blocks reserved for decoding."""
    refusal: str
    """Why the replica cannot take it; empty: it can."""


def best(offers: Iterable[Offer]) -> Offer | None:
    open_to_it = [offer for offer in offers if not offer.refusal]
    return min(open_to_it, key=lambda offer: (offer.load, offer.replica.id), default=None)


def prefill_offer(state: ClusterState, policy: Policy, request: Request, replica: Replica) -> Offer:
    there = state.requests_on(replica.id)
    prefilling = [r.prompt_tokens for r in there if r.state is RequestState.PREFILLING]
    granted, limit = len(prefilling), policy.max_prefills_per_replica
    if replica.state is ReplicaState.COLOCATED:
        blocks = _decode_blocks(policy, request, replica)
    else:
        blocks = _blocks_for(request.prompt_tokens + 1, replica)
    free = replica.blocks_total - state.blocks_reserved(replica.id)
    if replica.state not in TAKES_PROMPTS:
        refusal = f"it is {replica.state} and is given no prompts"
    elif granted >= limit:
        refusal = f"it has {granted} prefills, the limit"
    else:
        refusal = _no_room(blocks, free)
    return Offer(replica, blocks, free, granted, sum(prefilling), refusal)


def decode_offer(state: ClusterState, policy: Policy, request: Request, replica: Replica) -> Offer:
    reserved = state.blocks_reserved(replica.id)
    blocks = _decode_blocks(policy, request, replica)
    free = replica.blocks_total - reserved
    if replica.state in ACCEPTS_KV:
        refusal = _no_room(blocks, free)
    else:
        refusal = f"it is {replica.state} and accepts no KV"
    return Offer(replica, blocks, free, 0, reserved, refusal)


def _no_room(blocks: int, free: int) -> str:
    return f"{blocks} blocks are needed, {free} are free" if blocks > free else ""


def _blocks_for(tokens: int, replica: Replica) -> int:
    # A replica without weights has no blocks, and no size of one.
    return -(-tokens // replica.block_tokens) if replica.block_tokens else 0


def _decode_blocks(policy: Policy, request: Request, replica: Replica) -> int:
    output_tokens = min(request.max_tokens, policy.decode_reserve_tokens)
    wanted = _blocks_for(request.prompt_tokens + output_tokens, replica)
    return min(wanted, replica.blocks_total)
