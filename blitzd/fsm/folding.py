"""What the folders share: their registry, look-ups that refuse, and moves by the table."""

from collections.abc import Callable
from typing import Any

from blitzd.events.record import Payload, Record
from blitzd.fsm.entities import Pair, Replica, Request
from blitzd.fsm.link import Lease
from blitzd.fsm.state import ClusterState
from blitzd.fsm.table import next_state


class IllegalEvent(Exception):
    """The event does not fit the state: it names something unknown, or an old epoch."""


Folder = Callable[[ClusterState, Any, Record], None]
FOLDERS: dict[type[Payload], Folder] = {}


def folds(event: type[Payload]) -> Callable[[Folder], Folder]:
    """Registers the folder of an event type. A folder asks first (and may raise), then
    changes entities and touches them, so that a refused event changes nothing."""

    def register(folder: Folder) -> Folder:
        FOLDERS[event] = folder
        return folder

    return register


def replica_of(state: ClusterState, replica_id: str, epoch: int | None = None) -> Replica:
    replica = state.replicas.get(replica_id)
    if replica is None:
        raise IllegalEvent(f"replica {replica_id!r} is not registered")
    if epoch is not None and epoch != replica.epoch:
        raise IllegalEvent(f"replica {replica_id} is at epoch {replica.epoch}, not {epoch}")
    return replica


def request_of(state: ClusterState, request_id: int) -> Request:
    request = state.requests.get(request_id)
    if request is None:
        raise IllegalEvent(f"request {request_id} is not under way")
    return request


def lease_of(state: ClusterState, lease_id: int) -> Lease:
    lease = state.leases.get(lease_id)
    if lease is None:
        raise IllegalEvent(f"lease {lease_id} is not open")
    return lease


def pair_of(state: ClusterState, pair_id: int) -> Pair:
    pair = state.pairs.get(pair_id)
    if pair is None:
        raise IllegalEvent(f"pair {pair_id} is not open")
    return pair


def move(replica: Replica, trigger: str, record: Record) -> None:
    new = next_state(f"replica {replica.id}", replica.state, trigger)
    if new is not replica.state:
        replica.state = new
        replica.since_seq = record.seq
        replica.cause_seq = record.cause


def count(state: ClusterState, what: str, times: int = 1) -> None:
    state.node.tallies[what] = state.node.tallies.get(what, 0) + times
    state.touch("node", 0)


def forget_links(state: ClusterState, replica_id: str) -> None:
    """Of a life that is over."""
    for link in [k for k in state.links.values() if replica_id in (k.source, k.target)]:
        del state.links[link.key]
        state.touch("link", link.key)


def forget_weights(replica: Replica) -> None:
    replica.digest = replica.source = ""
    replica.peers = replica.shards = replica.skipped = ()
    replica.rung = ""
    replica.pooled = ""
    replica.layers_ready = replica.bytes_loaded = 0
    replica.blocks_total = replica.blocks_sampled = replica.running_sampled = 0


def require_idle(state: ClusterState, replica: Replica) -> None:
    held = state.requests_on(replica.id)
    if held:
        raise IllegalEvent(f"replica {replica.id} still has {len(held)} requests")
