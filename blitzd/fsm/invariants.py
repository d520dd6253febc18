"""What must hold after every event (reference 1.5, re-derived for leases and pairs).

Checked after each fold in tests and in debug mode, and when the node is idle in
production: a violation is a defect of ours and is reported, never repaired in silence.
"""

from collections.abc import Callable, Iterator

from blitzd.fsm.request import ENDS, RequestState
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import LOADING, WITHOUT_WEIGHTS, ReplicaState

S = ReplicaState
MAY_RECEIVE = frozenset({S.DECODE, S.COLOCATED, S.SHUTTING_DECODE, S.AUS_PREFILL, S.AUS_DECODE})
"""States in which a lease that was opened before may still be running."""
MAY_HOLD = frozenset(S) - {S.INACTIVE, S.FAILED, S.SHUTTING_NULL}
"""States in which a replica may have requests."""


def violations(state: ClusterState) -> list[str]:
    """Each in a sentence; empty when all is well."""
    return [problem for check in CHECKS for problem in check(state)]


def _guards(state: ClusterState) -> Iterator[str]:
    """1: KV is on its way only to replicas that have, or had, their guard open."""
    for lease in state.leases.values():
        target = state.replicas.get(lease.target)
        if target is None or target.epoch != lease.target_epoch:
            yield f"lease {lease.id} leads to {lease.target}/{lease.target_epoch}, which is gone"
        elif target.state not in MAY_RECEIVE:
            yield f"lease {lease.id} leads to {target.id}, which is {target.state}"


def _weights(state: ClusterState) -> Iterator[str]:
    """2 and 7: who serves has all layers; who is inactive has none."""
    for replica in state.replicas.values():
        if replica.state in WITHOUT_WEIGHTS:
            if replica.digest or replica.layers_ready or replica.blocks_total:
                yield f"{replica.id} is {replica.state} and has weights"
        elif replica.state not in LOADING and not (
            replica.digest and 0 < replica.layers_ready == replica.layers_total
        ):
            ready = f"{replica.layers_ready} of {replica.layers_total}"
            yield f"{replica.id} is {replica.state} with {ready} layers"


def _feeds(state: ClusterState) -> Iterator[str]:
    """Who loads from a replica does so from others than itself, in no circle."""
    for replica in state.replicas.values():
        if replica.peers and replica.state not in LOADING:
            yield f"{replica.id} is {replica.state} and still loads from {replica.source}"
        seen = {replica.id}
        source = state.feeder(replica)
        while source is not None:
            if source.id in seen:
                yield f"{replica.id} loads from {source.id} in a circle"
                break
            seen.add(source.id)
            source = state.feeder(source)


def _pool(state: ClusterState) -> Iterator[str]:
    """One node at most keeps a copy for the others, in a worker that has nothing else to do."""
    pooled = [r for r in state.replicas.values() if r.pooled]
    if len(pooled) > 1:
        yield f"{', '.join(r.id for r in pooled)} each keep a copy for others"
    for replica in pooled:
        if replica.state is not S.INACTIVE or replica.worker != "attached":
            yield f"{replica.id} is {replica.state} and keeps a copy for others"


def _pairs(state: ClusterState) -> Iterator[str]:
    """3: old and new ones come in pairs, except a new one whose old has died."""
    for replica in state.replicas.values():
        pair = state.pairs.get(replica.pair_id)
        if replica.state is S.OLD_PREFILL and (pair is None or pair.old != replica.id):
            yield f"{replica.id} is OldPrefill of no pair"
        if replica.pair_id and pair is None:
            yield f"{replica.id} is of pair {replica.pair_id}, which is not open"
    for pair in state.pairs.values():
        new, old = state.replicas.get(pair.new), state.replicas.get(pair.old)
        if new is None or old is None or {new.pair_id, old.pair_id} != {pair.id}:
            yield f"pair {pair.id} of {pair.new} and {pair.old} is not whole"
        elif new.state not in (S.NEW_PREFILL, S.REFACTORY_PREFILL) or old.state is not (
            S.OLD_PREFILL
        ):
            yield f"pair {pair.id}: {new.id} is {new.state}, {old.id} is {old.state}"


def _leases(state: ClusterState) -> Iterator[str]:
    """5: a lease leads from one replica to another, for one request that knows it."""
    for lease in state.leases.values():
        request = state.requests.get(lease.request_id)
        if lease.source == lease.target:
            yield f"lease {lease.id} leads from {lease.source} to itself"
        if request is None or request.lease_id != lease.id:
            yield f"lease {lease.id} belongs to no request"
        elif (request.source, request.rest, request.split_layer, request.target) != (
            lease.source,
            lease.rest,
            lease.split_layer,
            lease.target,
        ):
            yield f"lease {lease.id} and request {request.id} name other replicas"
    for request in state.requests.values():
        if request.lease_id and request.lease_id not in state.leases:
            yield f"request {request.id} has lease {request.lease_id}, which is not open"


def _requests(state: ClusterState) -> Iterator[str]:
    """Each request is where its state says, on replicas that live."""
    for request in state.requests.values():
        wanted = WHERE.get(request.state)
        if request.state in ENDS or wanted is None:
            yield f"request {request.id} is {request.state} and still there"
            continue
        has = (bool(request.source), bool(request.target), bool(request.lease_id))
        if has not in wanted:
            yield f"request {request.id} is {request.state} with source, target, lease {has}"
        for replica_id, epoch, blocks in (
            (request.source, request.source_epoch, request.source_blocks),
            (request.rest, request.rest_epoch, request.rest_blocks),
            (request.target, request.target_epoch, request.target_blocks),
        ):
            if not replica_id:
                if epoch or blocks:
                    yield f"request {request.id} has {blocks} blocks of epoch {epoch} nowhere"
                continue
            replica = state.replicas.get(replica_id)
            if replica is None or replica.epoch != epoch or replica.worker != "attached":
                yield f"request {request.id} is on {replica_id}/{epoch}, which is gone"
            elif replica.state not in MAY_HOLD:
                yield f"request {request.id} is on {replica_id}, which is {replica.state}"


WHERE: dict[RequestState, frozenset[tuple[bool, bool, bool]]] = {
    RequestState.QUEUED: frozenset({(False, False, False)}),
    RequestState.PREFILLING: frozenset({(True, False, False)}),
    RequestState.RELAYED: frozenset({(True, False, False)}),
    RequestState.MIGRATING: frozenset({(True, False, False), (True, True, True)}),
    RequestState.DECODING: frozenset({(False, True, False)}),
}


MAY_SHARE = (RequestState.PREFILLING, RequestState.RELAYED, RequestState.MIGRATING)


def _relays(state: ClusterState) -> Iterator[str]:
    """A request that two replicas share says who has which layers, and holds blocks on both;
    New has no more of them pending than its pair's cap."""
    for request in state.requests.values():
        shares = request.state in MAY_SHARE and request.source and request.rest_blocks
        if request.rest and not shares:
            yield f"request {request.id} is {request.state} and shared with {request.rest}"
        began = request.state is not RequestState.PREFILLING
        if bool(request.rest) != bool(request.split_layer) and (began or request.split_layer):
            split = request.split_layer
            yield f"request {request.id} is split at {split} with {request.rest or 'nobody'}"
    for pair in state.pairs.values():
        pending = state.index.prefilling[pair.new]
        if pending > pair.cap:
            yield f"{pair.new} has {pending} requests pending, its pair's cap is {pair.cap}"


def _blocks(state: ClusterState) -> Iterator[str]:
    """8: reservations are neither negative nor more than there is."""
    for replica in state.replicas.values():
        reserved = state.blocks_reserved(replica.id)
        if not 0 <= reserved <= replica.blocks_total:
            yield f"{replica.id} has {reserved} of {replica.blocks_total} blocks reserved"


def _workers(state: ClusterState) -> Iterator[str]:
    """What has weights, or gets them, has a worker."""
    for replica in state.replicas.values():
        if replica.state not in WITHOUT_WEIGHTS and replica.worker != "attached":
            yield f"{replica.id} is {replica.state} with worker {replica.worker}"


def _index(state: ClusterState) -> Iterator[str]:
    """The index says of the entities what one made anew says."""
    for name in state.index.differs_from(ClusterState.decode(state.encode()).index):
        yield f"the index has other {name} than the entities"


Check = Callable[[ClusterState], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    _guards,
    _weights,
    _feeds,
    _pool,
    _pairs,
    _leases,
    _requests,
    _relays,
    _blocks,
    _workers,
    _index,
)
