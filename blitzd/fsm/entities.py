"""The entities of the state. They hold integers and strings only.

A field that has its default is left out of what is hashed and of snapshots. So a field can
be added without changing the hash of any state that a log recorded before (but a sixteenth,
which makes msgspec write another header). No entity can be part of a reference cycle, so the
collector is not asked to look.
"""

import msgspec

from blitzd.fsm.request import RequestState
from blitzd.fsm.table import ReplicaState


class Node(msgspec.Struct, omit_defaults=True):
    """The daemon itself, under the key 0 of its table."""

    name: str = ""
    boot_epoch: int = 0
    version: str = ""
    phase: str = "stopped"
    """stopped, running or draining."""
    drain_deadline_ns: int = 0
    policy: dict[str, int] = {}
    tallies: dict[str, int] = {}
    """Requests that have ended, by end, and stale notices. Ended requests leave the state."""
    next_lease: int = 1
    next_pair: int = 1
    wanted_prefill: int = 0
    """What an operator scaled to; 0: nothing but the configuration."""
    wanted_decode: int = 0
    rolling: dict[str, int] = {}
    """Of a rolling restart: the epochs that are to be left, by replica."""
    rolling_drain_ms: int = 0
    host_copies: dict[str, int] = {}
    """By node: when a load last left a copy of the model in its memory."""
    core_version: int = 0
    """Of the decisions since this boot, so that a snapshot says how to go on from it."""


STEADY_NS = 60 * 10**9
"""A worker that lived so long did not die of its start."""


class Replica(msgspec.Struct, omit_defaults=True, gc=False):
    id: str
    node: str
    role: str
    """What it is to be: prefill, decode, colocated or spare (nothing)."""
    configured: str
    """The role that the configuration gave it; a change there overrides `role`."""
    state: ReplicaState = ReplicaState.INACTIVE
    epoch: int = 0
    worker: str = "absent"
    """absent, spawning, spawned, attached, stopping, or awaited with its node."""
    pid: int = 0
    retry_ns: int = 0
    """No new worker and no new load before this time."""
    failures: int = 0
    """In a row, since the last load that succeeded."""
    attached_ns: int = 0
    """When its worker attached; 0: it has none."""
    trouble: str = ""
    """Why it failed last, until it serves again."""
    digest: str = ""
    source: str = ""
    """Where its weights came from, or come from now: a replica, or what the worker says."""
    peers: tuple[tuple[str, int], ...] = ()
    """(replica, epoch) that a load may get its weights from, while it runs."""
    rung: str = ""
    """Of the ladder, by which a load under way has its source."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(rung, why it did not apply) of those before it."""
    shards: tuple[tuple[str, int], ...] = ()
    """(replica, epoch) that bring a shard of them each to its domain, while it runs."""
    peer_failures: int = 0
    """Loads from peers that failed, in a row."""
    pooled: str = ""
    """Of a spare: filling or held, the model in its node's memory for whoever loads."""
    layers_ready: int = 0
    layers_total: int = 0
    bytes_loaded: int = 0
    bytes_total: int = 0
    block_tokens: int = 0
    blocks_total: int = 0
    blocks_sampled: int = 0
    """In use when the worker last said so."""
    running_sampled: int = 0
    pair_id: int = 0
    null_role: str = ""
    """What a ShuttingNull was before."""
    null_ns: int = 0
    """Since when it is one."""
    cordoned: int = 0
    """1: an operator drained it, so that no plan brings it back."""
    drain_deadline_ns: int = 0
    restart_epoch: int = 0
    """The epoch that a restart is to end; 0: none is under way."""
    restart_ns: int = 0
    """Since when."""
    restart_drain_ms: int = 0
    stands_in: str = ""
    """Whose role it has while that one restarts."""
    prompt_ns: int = 0
    """When a prompt was last ready there, or the first was begun, and when KV was last in:
    kept while the planner is on."""
    import_ns: int = 0
    dirty_ns: int = 0
    """Since when its worker holds something without a request; 0: as far as known, nothing."""
    audits_failed: int = 0
    """In a row."""
    kv_in: int = 0
    """Bytes of hand-overs that have ended well, and of weights that came from replicas."""
    kv_out: int = 0
    weights_in: int = 0
    weights_out: int = 0
    since_seq: int = 0
    """The event that led to this state, and what caused that event."""
    cause_seq: int = 0

    def failures_at(self, mono_ns: int) -> int:
        """Of starts, in a row: none once its worker has lived for `STEADY_NS`."""
        steady = self.attached_ns and mono_ns - self.attached_ns >= STEADY_NS
        return 0 if steady else self.failures


RESUME_CAUSES = ("worker_lost", "handover_failed", "engine_error", "drain_deadline", "links_down")


class Loss(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request had on a replica was lost there."""

    replica: str
    epoch: int
    reason: str

    def __str__(self) -> str:
        return f"{self.replica}/{self.epoch} ({self.reason})"


class Request(msgspec.Struct, omit_defaults=True, gc=False):
    id: int
    state: RequestState
    prompt_tokens: int
    max_tokens: int
    seed: int
    deadline_ns: int
    arrived_ns: int
    source: str = ""
    """The prefill replica, while it holds KV of this request."""
    source_epoch: int = 0
    source_blocks: int = 0
    target: str = ""
    """The decode replica, from the moment its blocks are reserved."""
    target_epoch: int = 0
    target_blocks: int = 0
    lease_id: int = 0
    retry_ns: int = 0
    """No grant and no lease before this time."""
    resumable: int = 1
    resumes: int = 0
    """Also the number of the attempt that runs now."""
    output_tokens: int = 0
    """That the client had when this attempt began."""
    losses: tuple[Loss, ...] = ()
    """Those without a new token in between, the last ones."""
    moving: str = ""
    """The last step of a move: asked, held, or stays, which is for good."""
    tried: tuple[str, ...] = ()
    """Targets (ID/EPOCH) that the KV of this attempt could not be handed to."""
    rest: str = ""
    """Of a live pair, while it holds or may get KV of this request: the replica that goes on
    with what its source has begun."""
    rest_epoch: int = 0
    rest_blocks: int = 0
    split_layer: int = 0
    """Layers before it ran on the source, the others on `rest`; 0: all on the source, so far."""
    relayed_ns: int = 0
    """Since when `rest`, or the source if it had nothing of it, goes on with it."""
    whole: int = 0
    """1: a replica that serves while it loads does not take it."""

    @property
    def known_tokens(self) -> int:
        """What a prefill of this attempt computes."""
        return self.prompt_tokens + self.output_tokens

    @property
    def runner(self) -> tuple[str, int]:
        """(replica, epoch) of who computes its prompt."""
        if self.state is RequestState.RELAYED and self.rest:
            return self.rest, self.rest_epoch
        return self.source, self.source_epoch

    def on(self) -> list[tuple[str, int]]:
        """(replica, epoch) of the workers that have, or may have, something of this attempt."""
        places = (
            (self.source, self.source_epoch),
            (self.rest, self.rest_epoch),
            (self.target, self.target_epoch),
        )
        return [place for place in places if place[0]]


PAIR_CAP_LEAST = 2
PAIR_CAP_STEP_NS = 200_000_000


class Pair(msgspec.Struct, omit_defaults=True, gc=False):
    """Two prefill replicas of which one still loads."""

    id: int
    new: str
    new_epoch: int
    old: str
    old_epoch: int
    cap: int
    opened_ns: int
    following: int = 0
    """1: Old takes over from New."""
    drained: int = 0
    """1: it did, and New had all layers and nothing left."""
    follow_faults: int = 0
    retry_ns: int = 0
    """Old is not told again before this time."""

    def cap_at(self, now_ns: int) -> int:
        """How many requests may be pending on New: at first its few layers can be run ahead,
        later one is there only a short time. max(2, 4 - floor(elapsed / 200 ms)) in the
        original (reference 2.2), where `cap` is 4."""
        steps = (now_ns - self.opened_ns) // PAIR_CAP_STEP_NS
        return max(min(PAIR_CAP_LEAST, self.cap), self.cap - steps)
