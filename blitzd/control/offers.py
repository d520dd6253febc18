"""What each replica offers a request, and which offer is taken: the facts that dispatch
decides on, and that `blitzd replay --plan` shows.

*Prompts* go where the fewest prompt tokens wait to be computed. Of a live pair the one that
loads takes them, and the other what that one cannot take (`pairs`).

*KV* goes where the fewest blocks are in use: reserved, or more than that if the worker says
so, since a generation may outgrow its reservation. Three rules keep that fair:

- A replica takes only so many transfers at a time (`max_imports_per_replica`). A new, empty
  replica is the best choice for everything that waits; with the limit it gets that by and by,
  as transfers end, and what is over goes to the next best meanwhile.
- A replica with more than twice the mean, and more than half of its own blocks, in use takes
  nothing, if any other could ever take it (the original's reject rule; reference 7.6). What
  is taken by this rule waits for the others, whose requests end.
- First come, first served: nobody overtakes the first that does not fit, so that one with a
  long prompt is not starved by short ones.
"""

from collections.abc import Iterator
from typing import NamedTuple

from blitzd.control.policy import Policy
from blitzd.fsm import ClusterState, Replica, ReplicaState, Request
from blitzd.fsm.index import takes_prompts
from blitzd.fsm.link import Link, link_key
from blitzd.fsm.table import ACCEPTS_KV


class Offer(NamedTuple):
    replica: Replica
    blocks: int
    """What would be reserved there."""
    free: int
    """Blocks that are not reserved."""
    busy: int
    """Requests being prefilled there, or transfers to there."""
    load: int
    """The smallest is taken, then the smallest id: prompt tokens being prefilled there, or
    blocks in use for decoding."""
    lost: bool
    """The request was lost there since its last token, or its KV could go nowhere from there;
    the others come first."""
    refusal: str
    """Why the replica cannot take it; empty: it can."""
    rest: Replica | None = None
    """Who may go on with it, in a live pair, and what would be reserved there."""
    rest_blocks: int = 0


def best_prefill(
    state: ClusterState, policy: Policy, request: Request, now_ns: int
) -> Offer | None:
    """Where its prompt is computed; None: it waits."""
    index = state.index
    if _none_below(index.grants.least(), policy.max_prefills_per_replica):
        return None
    if (index.prompt_free.most() or 0) < _prefill_tokens(state, request):
        return None
    offers = (
        prefill_offer(state, policy, request, replica, now_ns)
        for replica in map(state.replicas.__getitem__, index.takers)
        # Hundreds may be Old of a pair, and come first, since they are given nothing.
        if not (
            replica.state is ReplicaState.OLD_PREFILL and _only_goes_on(state, request, replica)
        )
    )
    return _first_open(offers)


def best_decode(state: ClusterState, policy: Policy, request: Request) -> Offer | None:
    """Where its KV goes; None: it waits where it is."""
    index = state.index
    if _none_below(index.imports.least(), policy.max_imports_per_replica):
        return None
    if (index.kv_free.most() or 0) < _decode_tokens(state, policy, request):
        return None
    offers = (
        decode_offer(state, policy, request, state.replicas[replica_id])
        for replica_id in index.acceptors
    )
    return _first_open(offers)


def _none_below(least: int | None, limit: int) -> bool:
    """Rules out a walk through thousands of replicas that are all busy."""
    return least is None or least >= limit


def _first_open(offers: Iterator[Offer]) -> Offer | None:
    second_choice = None
    for offer in offers:
        if offer.refusal:
            continue
        if not offer.lost:
            return offer
        second_choice = second_choice or offer
    return second_choice


def prefill_offer(
    state: ClusterState, policy: Policy, request: Request, replica: Replica, now_ns: int
) -> Offer:
    index, limit = state.index, policy.max_prefills_per_replica
    granted, load = index.prefilling[replica.id], index.prefill_tokens[replica.id]
    if replica.state is ReplicaState.COLOCATED:
        blocks = _blocks_for(_decode_tokens(state, policy, request), replica)
    else:
        blocks = _blocks_for(_prefill_tokens(state, request), replica)
    free = replica.blocks_total - index.reserved[replica.id]
    rest = _rest_of(state, replica)
    rest_blocks = _blocks_for(_prefill_tokens(state, request), rest) if rest else 0
    if not takes_prompts(replica):
        refusal = f"it is {replica.state} and is given no prompts"
    elif granted >= limit:
        refusal = f"it has {granted} prefills, the limit"
    elif refusal := _pair_rule(state, request, replica, now_ns):
        pass
    elif rest is not None and rest_blocks > (there := rest.blocks_total - index.reserved[rest.id]):
        refusal = f"{rest_blocks} blocks are needed on {rest.id} of its pair, {there} are free"
    else:
        refusal = _no_room(blocks, free)
    lost = _lost_there(request, replica) or cut_off(state, replica)
    return Offer(replica, blocks, free, granted, load, lost, refusal, rest, rest_blocks)


def _rest_of(state: ClusterState, replica: Replica) -> Replica | None:
    pair = state.pairs.get(replica.pair_id)
    new = pair is not None and replica.state is ReplicaState.NEW_PREFILL
    return state.replicas[pair.old] if pair is not None and new else None


def _pair_rule(state: ClusterState, request: Request, replica: Replica, now_ns: int) -> str:
    """Why a side of a live pair is not given the prompt (the reasons are in `pairs`)."""
    pair = state.pairs.get(replica.pair_id)
    if pair is None:
        return ""
    if replica.id == pair.new and request.whole:
        return "it has said that it cannot take this one while it loads"
    if replica.id == pair.old and _only_goes_on(state, request, replica):
        return f"it goes on with what {pair.new} has, its pair"
    pending, cap = state.index.prefilling[replica.id], pair.cap_at(now_ns)
    return f"it has {pending} prefills, its pair's limit by now" if pending >= cap else ""


def _only_goes_on(state: ClusterState, request: Request, old: Replica) -> bool:
    """Whether New takes it, now or once it has room; its machine may be too small for this one."""
    if request.whole:
        return False
    new = state.replicas[state.pairs[old.pair_id].new]
    fits = _blocks_for(_prefill_tokens(state, request), new) <= new.blocks_total
    return fits and takes_prompts(new)


def decode_offer(state: ClusterState, policy: Policy, request: Request, replica: Replica) -> Offer:
    index, limit = state.index, policy.max_imports_per_replica
    reserved, importing = index.reserved[replica.id], index.importing[replica.id]
    load = max(reserved, replica.blocks_sampled)
    blocks = _blocks_for(_decode_tokens(state, policy, request), replica)
    free = replica.blocks_total - reserved
    if replica.state not in ACCEPTS_KV:
        refusal = f"it is {replica.state} and accepts no KV"
    elif replica.id in (request.source, request.rest):
        refusal = "its KV is there, waiting to go elsewhere"
    elif has_failed(request, replica):
        refusal = "it could not take up the KV of this attempt"
    elif trouble := _link_trouble(state, request, replica.id):
        refusal = trouble
    elif importing >= limit:
        refusal = f"it takes {importing} transfers already, the limit"
    else:
        refusal = _no_room(blocks, free) or _overloaded(state, replica, load, blocks)
    return Offer(replica, blocks, free, importing, load, _lost_there(request, replica), refusal)


def worst_link(state: ClusterState, request: Request, target: str) -> Link | None:
    """Of those that its KV would go over to there, the one that rests longest; None: none has
    failed."""
    sources = [source for source in (request.source, request.rest) if source]
    links = [state.links.get(link_key(source, target)) for source in sources]
    return max((k for k in links if k is not None), key=lambda k: k.cool_ns, default=None)


def _link_trouble(state: ClusterState, request: Request, target: str) -> str:
    link = worst_link(state, request, target)
    if link is None:
        return ""
    if link.cool_ns:
        return f"its link from {link.source} cools down after {link.faults} faults: {link.reason}"
    for lease in state.leases.values():
        if lease.target == target and link.source in (lease.source, lease.rest):
            return f"its link from {link.source} is being tried again"
    return ""


def cut_off(state: ClusterState, replica: Replica) -> bool:
    """Whether what it prefills can go nowhere for now."""
    if not state.links or replica.state is not ReplicaState.PREFILL:
        return False
    links = [state.links.get(link_key(replica.id, target)) for target in state.index.acceptors]
    return bool(links) and all(link is not None and link.cool_ns for link in links)


def has_failed(request: Request, replica: Replica) -> bool:
    """Whether a hand-over of this attempt to the replica has failed."""
    return f"{replica.id}/{replica.epoch}" in request.tried


def _lost_there(request: Request, replica: Replica) -> bool:
    here = (replica.id, replica.epoch)
    return any((loss.replica, loss.epoch) == here for loss in request.losses)


def _no_room(blocks: int, free: int) -> str:
    return f"{blocks} blocks are needed, {free} are free" if blocks > free else ""


def _overloaded(state: ClusterState, replica: Replica, load: int, blocks: int) -> str:
    index = state.index
    count, total = len(index.acceptors), index.acceptors.total
    if load * count <= 2 * total or load * 2 <= replica.blocks_total:
        return ""
    if index.kv_room.count_from(blocks * replica.block_tokens) < 2:
        return ""  # nobody else will ever have the room
    return (
        f"{load} of its {replica.blocks_total} blocks are in use, more than half and more than"
        f" twice the mean of {total // count}"
    )


def _blocks_for(tokens: int, replica: Replica) -> int:
    # A replica without weights has no blocks, and no size of one.
    return -(-tokens // replica.block_tokens) if replica.block_tokens else 0


def _prefill_tokens(state: ClusterState, request: Request) -> int:
    """What it has and one token more, but for one that leaves the largest replica no room."""
    wanted = request.known_tokens + 1
    return min(wanted, state.index.prompt_room.most() or wanted)


def _decode_tokens(state: ClusterState, policy: Policy, request: Request) -> int:
    """What room is reserved for: not more than the largest replica has, so that a request
    that asks for more than it will need is served too."""
    # Of a request that was resumed, some of the output is there already.
    reserve = request.output_tokens + policy.decode_reserve_tokens
    output_tokens = min(request.max_tokens, reserve)
    wanted = request.prompt_tokens + output_tokens
    return min(wanted, state.index.kv_room.most() or wanted)
