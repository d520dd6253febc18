"""The pool: while no replica can give its weights, one node keeps a copy of them for all.

Theory of operation
-------------------
BlitzScale keeps at least one copy of a model in the cluster's memory, and no more host copies
than one (its paper, 5.3). Here every node has the prepared file on its disk, so that a model is
never lost; what can be missing is a copy that *moves* at the speed of the network: all decode
replicas died, or there are only prefills, whose egress is for KV. Then each load would read a
disk.

So a spare is told to map its node's file, read it once (which hashes it, and brings it into
memory) and offer it to peers, as a replica offers its weights. It computes nothing and has no
KV. A load hangs its chain onto it by the rung *pool* when the rungs before found nobody.

- *One at most*, and none once a replica gives: a device copy takes the place of a host's.
- *Redistributed*: when the keeper is lost, with its node or alone, the same turn has another.
- *Given up in time*: the keeper is the first spare to be raised, since it has the weights at
  hand, and is a copy on a device from then on.
- *Not for a moment*: a decode that loads, or waits for its worker, will give soon, so no copy
  is made because of it; one that has failed is not waited for.

It is kept only while `ladder_pool` is on and `ladder_map` is off: the mapped pool needs nobody
to keep it.
"""

from collections.abc import Callable

from blitzd.control.commands import HoldWeights, ResetWorker
from blitzd.control.holders import KV_LEAVES, busy_links
from blitzd.control.policy import Policy
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica, ReplicaState
from blitzd.fsm.flow import link_of
from blitzd.fsm.index import Group
from blitzd.fsm.table import LOADING, WITHOUT_WEIGHTS

S = ReplicaState
GIVES_LATER = ("decode", "colocated")
"""Roles whose egress will be free."""


def in_use(policy: Policy) -> bool:
    moves = policy.ladder_chain or policy.ladder_p2p
    return bool(policy.ladder_pool and moves and not policy.ladder_map)


def tend(turn: Turn) -> None:
    """Part of every turn, after its loads. Costs the same for any number of replicas, unless
    a copy is to be made."""
    state = turn.state
    running = state.node.phase == "running"
    if state.index.pooled:
        [keeper] = (state.replicas[replica_id] for replica_id in state.index.pooled)
        if not (running and in_use(turn.policy)):
            release(turn, keeper, "the policy wants no pool" if running else "the node stops")
        elif _some(turn, _gives) and keeper.id not in state.feeding():
            release(turn, keeper, "a replica gives the weights")
    elif running and in_use(turn.policy) and not (_some(turn, _gives) or _some(turn, _will_give)):
        _assign(turn)


def release(turn: Turn, keeper: Replica, reason: str) -> None:
    turn.emit(ev.PoolCopyReleased(keeper.id, keeper.epoch, reason))
    turn.command(ResetWorker(keeper.id, keeper.epoch, unload=True))


def copy_ended(turn: Turn, ended: ev.PoolCopyEnded) -> None:
    keeper = turn.current(ended.replica, ended.epoch)
    if keeper is None:
        return
    if keeper.pooled != "filling":
        turn.ignore(ended.replica, ended.epoch)
    elif ended.reason:
        retry_ns = turn.mono_ns + turn.policy.restart_backoff_max_ms * MS
        turn.emit(ev.PoolCopyFailed(keeper.id, keeper.epoch, ended.reason, retry_ns))
    else:
        turn.emit(ev.PoolCopyHeld(keeper.id, keeper.epoch, ended.bytes_total))


def keeper_of(turn: Turn) -> Replica | None:
    """Who has the whole copy by now."""
    for replica_id in turn.state.index.pooled:
        if turn.state.replicas[replica_id].pooled == "held":
            return turn.state.replicas[replica_id]
    return None


def _some(turn: Turn, applies: Callable[[Policy, Group], bool]) -> bool:
    return any(applies(turn.policy, group) for group in turn.state.index.groups)


def _gives(policy: Policy, group: Group) -> bool:
    """Whether these have weights and an egress for them."""
    if group.state in WITHOUT_WEIGHTS or group.state in LOADING or group.state is S.NEW_PREFILL:
        return False
    return group.state not in KV_LEAVES or bool(policy.ladder_prefills_give)


def _will_give(policy: Policy, group: Group) -> bool:
    """Whether these are on the way to that, and nothing went wrong yet."""
    waits = group.state is S.INACTIVE or group.state in LOADING
    roles = (*GIVES_LATER, "prefill") if policy.ladder_prefills_give else GIVES_LATER
    return waits and group.role in roles and not group.troubled and not group.cordoned


def _assign(turn: Turn) -> None:
    spares = [
        replica
        for replica in turn.state.in_states(S.INACTIVE, role="spare")
        if replica.worker == "attached"
        and not (replica.cordoned or replica.restart_epoch or turn.mono_ns < replica.retry_ns)
    ]
    if not spares:
        return
    keeper = min(spares, key=_rank(turn))
    turn.emit(ev.PoolCopyAssigned(keeper.id, keeper.epoch))
    turn.command(HoldWeights(keeper.id, keeper.epoch))


def _rank(turn: Turn) -> Callable[[Replica], tuple[bool, bool, int, str]]:
    """A node without weights before others, so that the loss of one takes one copy; then a
    link that nothing leaves by, then the fastest."""
    state, busy = turn.state, busy_links(turn)
    having = {
        state.replicas[replica_id].node
        for group, replica_ids in state.index.groups.items()
        if group.state not in WITHOUT_WEIGHTS
        for replica_id in replica_ids
    }

    def rank(replica: Replica) -> tuple[bool, bool, int, str]:
        links = state.topology.get(replica.node)
        rate = links.rate if links else 0
        return (replica.node in having, link_of(state, replica) in busy, -rate, replica.id)

    return rank
