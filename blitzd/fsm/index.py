"""What decisions ask of the state all the time, answered without walking through it.

An index is no state: it follows from the entities alone, is in no snapshot and in no hash,
and `violations` holds it against one that is made anew. Nothing counts up or down beside
the fold either. The fold marks what it touches, as it does for the hash; before the next
question, what those entities said last is taken out and what they say now is put in.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from blitzd.fsm.entities import Replica, Request
from blitzd.fsm.request import RequestState
from blitzd.fsm.table import ACCEPTS_KV, ACCEPTS_PROMPTS, ReplicaState

if TYPE_CHECKING:
    from blitzd.fsm.state import ClusterState

S = ReplicaState
TAKES_PROMPTS = frozenset({S.PREFILL, S.OLD_PREFILL, S.COLOCATED})
DECODE_SIDE = frozenset(
    {S.DECODE, S.AUS_DECODE, S.MUTATING_TO_DECODE, S.SHUTTING_DECODE, S.AUS_PREFILL}
)
"""Where KV lives until its request ends; what a Colocated holds is nobody else's matter."""

RANKED = TAKES_PROMPTS | ACCEPTS_PROMPTS | ACCEPTS_KV | {S.SHUTTING_NULL}

NameT = TypeVar("NameT", str, int)


class Ranking(Generic[NameT]):
    """Names in order of a number, then of themselves. Changes cost a binary search and a
    move of pointers: microseconds with ten thousand names."""

    def __init__(self) -> None:
        self._order: list[tuple[int, NameT]] = []
        self._numbers: dict[NameT, int] = {}
        self.total = 0
        """Of all numbers."""

    def put(self, name: NameT, number: int | None) -> None:
        """None takes the name out."""
        known = self._numbers.get(name)
        if known == number:
            return
        if known is not None:
            del self._order[bisect_left(self._order, (known, name))]
            del self._numbers[name]
            self.total -= known
        if number is not None:
            insort(self._order, (number, name))
            self._numbers[name] = number
            self.total += number

    def __iter__(self) -> Iterator[NameT]:
        return (name for _, name in self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranking) and self._order == other._order

    def __hash__(self) -> int:
        return id(self)

    def least(self) -> int | None:
        return self._order[0][0] if self._order else None

    def most(self) -> int | None:
        return self._order[-1][0] if self._order else None

    def count_from(self, number: int) -> int:
        """Names whose number is at least that."""
        return len(self._order) - bisect_left(self._order, (number,))


class Group(NamedTuple):
    """What replicas have in common that a plan may choose among."""

    role: str
    state: ReplicaState
    cordoned: bool
    troubled: bool
    """Failed, or Inactive after a failure: nobody can say when it will serve."""


class RequestRow(NamedTuple):
    """What an index takes from a request."""

    state: RequestState
    tokens: int
    source: str
    source_blocks: int
    rest: str
    rest_blocks: int
    target: str
    target_blocks: int
    runner: str
    """Who computes its prompt, while somebody does."""
    leased: bool


class ReplicaRow(NamedTuple):
    """What an index takes from a replica."""

    group: Group
    blocks_total: int
    block_tokens: int
    kv_blocks: int


class Index:
    def __init__(self) -> None:
        self._requests: dict[int, RequestRow] = {}
        self._replicas: dict[str, ReplicaRow] = {}
        self.on: dict[str, set[int]] = {}
        """Requests that hold or have reserved blocks, by replica."""
        self.reserved: Counter[str] = Counter()
        """Blocks, by replica."""
        self.prefilling: Counter[str] = Counter()
        """Requests that are being prefilled, by replica."""
        self.prefill_tokens: Counter[str] = Counter()
        """Tokens to be computed of those."""
        self.importing: Counter[str] = Counter()
        """Open inbound leases, by replica."""
        self.queued: Ranking[int] = Ranking()
        """Requests by id, which is the order of their arrival."""
        self.unplaced: Ranking[int] = Ranking()
        """Requests whose KV waits for a decode replica."""
        self.groups: dict[Group, list[str]] = {}
        """Replicas in order of their ids. No group is empty."""
        self.roles: Counter[str] = Counter()
        """How many replicas have a role or are on the way to it."""
        self.takers: Ranking[str] = Ranking()
        """Replicas that take prompts, by prompt tokens being prefilled there."""
        self.acceptors: Ranking[str] = Ranking()
        """Replicas that accept KV, by blocks that are reserved or in use."""
        self.grants: Ranking[str] = Ranking()
        """Replicas that take prompts, by requests being prefilled there."""
        self.imports: Ranking[str] = Ranking()
        """Replicas that accept KV, by open inbound leases."""
        self.prompt_free: Ranking[str] = Ranking()
        """Replicas that take prompts, by tokens that still fit."""
        self.kv_free: Ranking[str] = Ranking()
        """Replicas that accept KV, by tokens that still fit."""
        self.prompt_room: Ranking[str] = Ranking()
        """Replicas that accept prompts, by tokens that would fit an empty one."""
        self.kv_room: Ranking[str] = Ranking()
        """Replicas that accept KV, by tokens that would fit an empty one."""
        self.nulls: Ranking[str] = Ranking()
        """Warm spares, by the time that they have been so."""
        self.idle_workers: set[str] = set()
        """Replicas without a worker, or without the load that their role asks for."""
        self.restarting: set[str] = set()
        """Replicas that restart, or stand in for one that does."""
        self.pooled: set[str] = set()
        """Spares that keep the model in memory for others."""
        self.tokens: Counter[RequestState] = Counter()
        """Of prompts and of output that is computed again, by the state of their request."""
        self._ranked: set[str] = set()
        """Replicas that are in a ranking."""
        self._rankings = (
            self.takers,
            self.grants,
            self.prompt_free,
            self.prompt_room,
            self.acceptors,
            self.imports,
            self.kv_free,
            self.kv_room,
            self.nulls,
        )
        self.requests: Counter[RequestState] = Counter()
        self.unplaced_blocks = 0
        self.kv_blocks = 0
        """In use or reserved on the decode side."""
        self.kv_sizes: Counter[int] = Counter()
        """How many replicas of the decode side have so many blocks."""
        self.block_sizes: Counter[int] = Counter()
        """How many replicas have blocks of so many tokens."""

    def refresh(self, state: "ClusterState", stale: set[tuple[str, str | int]]) -> None:
        replicas: set[str] = set()
        for kind, key in stale:
            if kind == "request":
                assert isinstance(key, int)
                self._take_request(key, state.requests.get(key), replicas)
            elif kind == "replica":
                assert isinstance(key, str)
                replicas.add(key)
        for replica_id in replicas:
            self._take_replica(replica_id, state.replicas.get(replica_id))

    def differs_from(self, other: "Index") -> list[str]:
        """Names of what is not the same."""
        others = vars(other)
        return [name for name, mine in vars(self).items() if mine != others[name]]

    def group_of(self, replica_id: str) -> Group:
        return self._replicas[replica_id].group

    # Requests.

    def _take_request(self, key: int, request: Request | None, replicas: set[str]) -> None:
        old = self._requests.pop(key, None)
        new = None if request is None else _row_of(request)
        if old == new:
            if new is not None:
                self._requests[key] = new
            return
        if old is not None:
            self._count_request(key, old, -1, replicas)
        if new is not None:
            self._requests[key] = new
            self._count_request(key, new, 1, replicas)

    def _count_request(self, key: int, row: RequestRow, by: int, replicas: set[str]) -> None:
        _add(self.requests, row.state, by)
        _add(self.tokens, row.state, by * row.tokens)
        if row.state is RequestState.QUEUED:
            self.queued.put(key, key if by > 0 else None)
        elif row.state is RequestState.MIGRATING and not row.leased:
            self.unplaced.put(key, key if by > 0 else None)
            self.unplaced_blocks += by * row.source_blocks
        for replica_id, blocks in (
            (row.source, row.source_blocks),
            (row.rest, row.rest_blocks),
            (row.target, row.target_blocks),
        ):
            if not replica_id:
                continue
            replicas.add(replica_id)
            _add(self.reserved, replica_id, by * blocks)
            held = self.on.setdefault(replica_id, set())
            held.add(key) if by > 0 else held.discard(key)
            if not held:
                del self.on[replica_id]
        if row.runner:
            _add(self.prefilling, row.runner, by)
            _add(self.prefill_tokens, row.runner, by * row.tokens)
        if row.target and row.leased:
            _add(self.importing, row.target, by)

    # Replicas.

    def _take_replica(self, key: str, replica: Replica | None) -> None:
        old = self._replicas.get(key)
        if replica is None:
            self._count_replica(key, self._replicas.pop(key, None), None)
            for ranking in self._rankings:
                ranking.put(key, None)
            self._ranked.discard(key)
            self.idle_workers.discard(key)
            self.restarting.discard(key)
            self.pooled.discard(key)
            return
        at = replica.state
        troubled = at is S.FAILED or (at is S.INACTIVE and bool(replica.trouble))
        group = Group(replica.role, at, bool(replica.cordoned), troubled)
        kv_blocks = 0
        if at in DECODE_SIDE:
            kv_blocks = max(self.reserved[key], replica.blocks_sampled)
        new = ReplicaRow(group, replica.blocks_total, replica.block_tokens, kv_blocks)
        if new != old:
            self._replicas[key] = new
            self._count_replica(key, old, new)
        if at in RANKED or key in self._ranked:
            self._rank(replica)
        wants = _wants_work(replica)
        self.idle_workers.add(key) if wants else self.idle_workers.discard(key)
        restarts = replica.restart_epoch or replica.stands_in
        self.restarting.add(key) if restarts else self.restarting.discard(key)
        self.pooled.add(key) if replica.pooled else self.pooled.discard(key)

    def _rank(self, replica: Replica) -> None:
        key, at = replica.id, replica.state
        self._ranked.add(key) if at in RANKED else self._ranked.discard(key)
        reserved = self.reserved[key]
        room = replica.blocks_total * replica.block_tokens
        free = room - reserved * replica.block_tokens
        takes = takes_prompts(replica)
        self.takers.put(key, self.prefill_tokens[key] if takes else None)
        self.grants.put(key, self.prefilling[key] if takes else None)
        self.prompt_free.put(key, free if takes else None)
        self.prompt_room.put(key, room if room and at in ACCEPTS_PROMPTS else None)
        accepts = at in ACCEPTS_KV
        self.acceptors.put(key, max(reserved, replica.blocks_sampled) if accepts else None)
        self.imports.put(key, self.importing[key] if accepts else None)
        self.kv_free.put(key, free if accepts else None)
        self.kv_room.put(key, room if accepts else None)
        self.nulls.put(key, replica.null_ns if at is S.SHUTTING_NULL else None)

    def _count_replica(self, key: str, old: ReplicaRow | None, new: ReplicaRow | None) -> None:
        """Takes out what it was counted as, and puts in what it is."""
        was, now = old and old.group, new and new.group
        if was != now:
            self._regroup(key, was, now)
        if old is not None and new is not None and _same_blocks(old, new):
            return
        for row, by in ((old, -1), (new, 1)):
            if row is None:
                continue
            _add(self.block_sizes, row.block_tokens, by)
            if row.group.state in DECODE_SIDE:
                self.kv_blocks += by * row.kv_blocks
                _add(self.kv_sizes, row.blocks_total, by)

    def _regroup(self, key: str, was: Group | None, now: Group | None) -> None:
        if was is not None:
            group = self.groups[was]
            del group[bisect_left(group, key)]
            if not group:
                del self.groups[was]
        if now is not None:
            insort(self.groups.setdefault(now, []), key)
        if was is None or now is None or was.role != now.role:
            for role, by in ((was, -1), (now, 1)):
                if role is not None:
                    _add(self.roles, role.role, by)


def _same_blocks(old: ReplicaRow, new: ReplicaRow) -> bool:
    sides = (old.group.state in DECODE_SIDE, new.group.state in DECODE_SIDE)
    return old[1:] == new[1:] and sides[0] == sides[1]


def _row_of(request: Request) -> RequestRow:
    return RequestRow(
        request.state,
        request.known_tokens,
        request.source,
        request.source_blocks,
        request.rest,
        request.rest_blocks,
        request.target,
        request.target_blocks,
        request.runner[0] if request.state in BEING_PREFILLED else "",
        bool(request.lease_id),
    )


BEING_PREFILLED = (RequestState.PREFILLING, RequestState.RELAYED)


def takes_prompts(replica: Replica) -> bool:
    """Whether dispatch asks it. One that loads takes some in a pair, from when it has said
    that it can."""
    live = replica.state is S.NEW_PREFILL and replica.pair_id and replica.blocks_total
    return bool(live) or replica.state in TAKES_PROMPTS


def _wants_work(replica: Replica) -> bool:
    """A worker, or the load that makes it what it is to be."""
    if replica.worker == "absent":
        return True
    to_load = replica.state is S.INACTIVE and replica.role != "spare" and not replica.cordoned
    return to_load and replica.worker == "attached"


CountedT = TypeVar("CountedT")


def _add(counts: Counter[CountedT], key: CountedT, by: int) -> None:
    """Without zeros, so that an index made in another way is equal to it."""
    counted = counts[key] + by
    if counted:
        counts[key] = counted
    else:
        counts.pop(key, None)
