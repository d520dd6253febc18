"""The cluster's state: its entities, what is derived from them, and its hash.

Whatever can be computed from the entities (queue length, in-flight counts, reserved blocks,
links in use) is computed, never kept beside them; what is asked for all the time is in an
index that follows the entities by itself.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Self

import msgspec

from blitzd.events.topology_events import NodeLinks
from blitzd.fsm.agent import Agent, agents_json
from blitzd.fsm.entities import RESUME_CAUSES, Node, Pair, Replica, Request
from blitzd.fsm.flow import flow_json, links_json, moving, open_flows, topology_json
from blitzd.fsm.index import TAKES_PROMPTS, Index
from blitzd.fsm.link import Lease, Link, faulty_json
from blitzd.fsm.plan import Plan
from blitzd.fsm.request import RequestState
from blitzd.fsm.table import ACCEPTS_KV, LOADING, ReplicaState

HASH_MODULUS = 1 << 256

COUNTED = (
    *("stale_notices", "link_faults", "kv_mismatches", "audits_failed", "invariants_broken"),
    *("relays", "relayed_layers_new", "relayed_layers_old"),
)
"""Tallies that `/admin/state` shows beside the ends of requests."""


Entity = Node | Replica | Request | Lease | Link | Pair | Plan | Agent | NodeLinks
Key = tuple[str, str | int]


TABLES = {
    "replica": "replicas",
    "request": "requests",
    "lease": "leases",
    "link": "links",
    "pair": "pairs",
    "agent": "agents",
    "topology": "topology",
}


class ClusterState:
    """Everything the fold knows. Mutated by `fold` alone."""

    def __init__(self) -> None:
        self.seq = 0
        self.mono_ns = 0
        self.node = Node()
        self.replicas: dict[str, Replica] = {}
        self.requests: dict[int, Request] = {}
        self.leases: dict[int, Lease] = {}
        self.links: dict[str, Link] = {}
        self.pairs: dict[int, Pair] = {}
        self.plan = Plan()
        self.agents: dict[str, Agent] = {}
        """Of the nodes beside this one, those that are lost too."""
        self.topology: dict[str, NodeLinks] = {}
        """By node; of those that the configuration describes."""
        self._hashes: dict[Key, int] = {}
        self._dirty: set[Key] = {("node", 0)}
        self._sum = 0
        self._index = Index()
        self._stale: set[Key] = set()

    # Derived.

    @property
    def index(self) -> Index:
        """Of what is there now. Not to be kept: ask again after an event."""
        if self._stale:
            self._index.refresh(self, self._stale)
            self._stale.clear()
        return self._index

    def queued(self) -> Iterator[Request]:
        """In order of arrival, which is the order of their ids."""
        return (self.requests[request_id] for request_id in self.index.queued)

    def requests_on(self, replica: str) -> list[Request]:
        """Those that hold or have reserved blocks there, in order of arrival."""
        return [self.requests[key] for key in sorted(self.index.on.get(replica, ()))]

    def blocks_reserved(self, replica: str) -> int:
        return self.index.reserved[replica]

    def feeder(self, replica: Replica) -> Replica | None:
        """Who gives it the weights that it loads; None: nobody does, or not any more."""
        source = self.replicas.get(replica.source)
        fed = source is not None and (source.id, source.epoch) in replica.peers
        return source if fed else None

    def feeding(self) -> set[str]:
        """Replicas that give their weights to one that loads."""
        feeders = (self.feeder(replica) for replica in self.in_states(*LOADING))
        return {source.id for source in feeders if source is not None}

    def in_states(self, *states: ReplicaState, role: str = "") -> list[Replica]:
        """By id; with a role only those that have it."""
        found = [
            replica_id
            for group, replica_ids in self.index.groups.items()
            if group.state in states and role in ("", group.role)
            for replica_id in replica_ids
        ]
        return [self.replicas[replica_id] for replica_id in sorted(found)]

    def unserved_roles(self) -> list[str]:
        """Of prefill and decode, those in which no replica takes anything new."""
        takers = {"prefill": TAKES_PROMPTS, "decode": ACCEPTS_KV}
        return [role for role, states in takers.items() if not self.in_states(*states)]

    # The hash.

    def touch(self, kind: str, key: str | int) -> None:
        """Marks an entity for hashing and for the index. Cheap: either is made when it is
        asked for."""
        touched = (kind, key)
        self._dirty.add(touched)
        self._stale.add(touched)

    def hash(self) -> str:
        """A sum of per-entity hashes, so that its cost follows what changed and not what
        there is. 64 hex digits."""
        for kind, key in self._dirty:
            old = self._hashes.pop((kind, key), 0)
            entity = self.entity(kind, key)
            new = 0
            if entity is not None:
                encoded = _encoded(kind, key, entity)
                new = int.from_bytes(blake2b(encoded, digest_size=32).digest(), "little")
                self._hashes[kind, key] = new
            self._sum = (self._sum + new - old) % HASH_MODULUS
        self._dirty.clear()
        # Who only folds asks for hashes alone: what is stale must not pile up meanwhile.
        self.index  # noqa: B018
        return f"{self._sum:064x}"

    def entity(self, kind: str, key: str | int) -> Entity | None:
        """`kind` is node or plan (with key 0), replica, request, lease, link, pair, agent or
        topology (with a node's name)."""
        if kind == "node":
            return self.node
        if kind == "plan":
            return self.plan if self.plan != Plan() else None
        table: dict[Any, Entity] = getattr(self, TABLES[kind])
        return table.get(key)

    # Outside forms.

    def to_json(self) -> dict[str, Any]:
        """What `/admin/state` and `blitzd replay --state` show (plain JSON types)."""
        by_state = dict.fromkeys((s.value for s in RequestState), 0) | {
            name: count
            for name, count in self.node.tallies.items()
            if name in RequestState.__members__.values()
        }
        for request in self.requests.values():
            by_state[request.state.value] += 1
        index, now = self.index, moving(open_flows(self))
        return {
            "seq": self.seq,
            "hash": self.hash(),
            "node": {
                "name": self.node.name,
                "boot_epoch": self.node.boot_epoch,
                "version": self.node.version,
                "phase": self.node.phase,
                "drain_deadline_ns": self.node.drain_deadline_ns,
                "wanted": {
                    "prefill": self.node.wanted_prefill,
                    "decode": self.node.wanted_decode,
                },
                "rolling_restart": sorted(self.node.rolling),
                "policy": dict(sorted(self.node.policy.items())),
                **{name: self.node.tallies.get(name, 0) for name in COUNTED},
            },
            "agents": agents_json(self.agents.values()),
            "topology": topology_json(self),
            "replicas": [
                self._replica_json(r) | {"flow": flow_json(r, now)}
                for _, r in sorted(self.replicas.items())
            ],
            "queue": {
                "requests": len(index.queued),
                "tokens": index.tokens[RequestState.QUEUED],
            },
            "unserved": self.unserved_roles(),
            "requests": by_state,
            "resumes": {
                cause: self.node.tallies.get(f"resumed_{cause}", 0) for cause in RESUME_CAUSES
            },
            "links": links_json(self),
            "faulty_links": faulty_json(self.links.values()),
            "pairs": [
                {
                    "id": pair.id,
                    "new": pair.new,
                    "old": pair.old,
                    "cap": pair.cap,
                    "pending": index.prefilling[pair.new],
                    "following": bool(pair.following),
                    "follow_faults": pair.follow_faults,
                }
                for pair in self.pairs.values()
            ],
        }

    def _replica_json(self, replica: Replica) -> dict[str, Any]:
        return {
            "id": replica.id,
            "epoch": replica.epoch,
            "state": replica.state.value,
            "role": replica.role,
            "node": replica.node,
            "configured": replica.configured,
            "worker": replica.worker,
            "pid": replica.pid,
            "failures": replica.failures,
            "trouble": replica.trouble,
            "model_digest": replica.digest,
            "layers_ready": replica.layers_ready,
            "layers_total": replica.layers_total,
            "bytes_loaded": replica.bytes_loaded,
            "bytes_total": replica.bytes_total,
            "source": replica.source,
            "pooled": replica.pooled,
            "pair": replica.pair_id,
            "cordoned": bool(replica.cordoned),
            "drain_deadline_ns": replica.drain_deadline_ns,
            "restarting": bool(replica.restart_epoch),
            "stands_in": replica.stands_in,
            "inflight": len(self.index.on.get(replica.id, ())),
            "blocks_used": replica.blocks_sampled,
            "blocks_reserved": self.blocks_reserved(replica.id),
            "blocks_total": replica.blocks_total,
            "block_tokens": replica.block_tokens,
            "since_seq": replica.since_seq,
            "cause_seq": replica.cause_seq,
        }

    # Snapshots.

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(
            _Snapshot(
                self.seq,
                self.mono_ns,
                self.node,
                list(self.replicas.values()),
                list(self.requests.values()),
                list(self.leases.values()),
                list(self.pairs.values()),
                self.plan,
                list(self.links.values()),
                list(self.agents.values()),
                list(self.topology.values()),
            ),
            order="deterministic",
        )

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises msgspec.DecodeError or ValidationError when `data` is not a state."""
        snapshot = msgspec.msgpack.decode(data, type=_Snapshot)
        state = cls()
        state.seq, state.mono_ns = snapshot.seq, snapshot.mono_ns
        state.node = snapshot.node
        state.replicas = {r.id: r for r in snapshot.replicas}
        state.requests = {r.id: r for r in snapshot.requests}
        state.leases = {lease.id: lease for lease in snapshot.leases}
        state.pairs = {pair.id: pair for pair in snapshot.pairs}
        state.plan = snapshot.plan
        state.touch("plan", 0)
        state.links = {link.key: link for link in snapshot.links}
        state.agents = {agent.node: agent for agent in snapshot.agents}
        for agent in state.agents:
            state.touch("agent", agent)
        state.topology = {links.node: links for links in snapshot.topology}
        for node in state.topology:
            state.touch("topology", node)
        for replica in state.replicas:
            state.touch("replica", replica)
        for request in state.requests:
            state.touch("request", request)
        for lease in state.leases:
            state.touch("lease", lease)
        for link in state.links:
            state.touch("link", link)
        for pair in state.pairs:
            state.touch("pair", pair)
        return state


def _encoded(kind: str, key: str | int, entity: Entity) -> bytes:
    """(kind, key, entity) as MessagePack.

    msgspec gives a struct of more than 15 fields the wide header of a map, however few of
    them it writes. A new field must not change what is hashed, so the narrow one takes its
    place, but not for replicas, which have been hashed with the wide one from the start.
    """
    name, fields = _to_msgpack((kind, key)), _to_msgpack(entity)
    if fields.startswith(_WIDE_MAP) and fields[2] < 16 and kind != "replica":
        fields = bytes((0x80 | fields[2],)) + fields[3:]
    return b"\x93" + name[1:] + fields


_to_msgpack = msgspec.msgpack.Encoder(order="deterministic").encode
_WIDE_MAP = b"\xde\x00"


class _Snapshot(msgspec.Struct):
    seq: int
    mono_ns: int
    node: Node
    replicas: list[Replica]
    requests: list[Request]
    leases: list[Lease]
    pairs: list[Pair]
    plan: Plan = msgspec.field(default_factory=Plan)
    links: list[Link] = []
    agents: list[Agent] = []
    topology: list[NodeLinks] = []
