"""The policy: every number that decisions depend on, recorded with each start."""

from typing import Annotated, Self

import msgspec
from msgspec import Meta

from blitzd.control.commands import MAX_ATTEMPTS

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
Flag = Annotated[int, Meta(ge=0, le=1)]
OrNone = Annotated[int, Meta(ge=0, le=1_000_000_000)]
"""0: none."""
Floor = Annotated[int, Meta(ge=0, le=300_000)]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Integers only: milliseconds, tokens, requests, as the names say. An operator may
    change each within its bounds."""

    max_queued_requests: Count = 256
    """More than that are refused with 429."""
    max_prefills_per_replica: Count = 8
    """Requests granted to a prefill replica at a time; the rest stays in the daemon's queue."""
    max_imports_per_replica: Count = 4
    """KV transfers to a decode replica at a time; 1 is the original's guard."""
    decode_reserve_tokens: Count = 256
    """Output tokens that room is reserved for on a decode replica; what a request needs
    beyond that its worker finds as it goes, by preemption if it must."""
    lease_ttl_ms: Milliseconds = 30_000
    """A KV transfer that takes longer has failed, though it gets on."""
    lease_stall_ms: Milliseconds = 2_000
    """One that does not get on for so long has failed."""
    import_retry_ms: Milliseconds = 20
    """After a decode replica had no room."""
    link_cooldown_ms: Milliseconds = 1_000
    """After a failed transfer, before the same two replicas try again; doubles with each
    failure in a row up to `link_cooldown_max_ms`."""
    link_cooldown_max_ms: Milliseconds = 60_000
    link_wait_ms: Milliseconds = 5_000
    """A prefilled request with no other link waits so long for one that cools down; for longer
    ones it is computed again elsewhere, if there is somewhere with a better link."""
    move_min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 64
    """A request that decodes on a replica that shuts moves on with its KV if more tokens than
    that may be left; 0: it finishes there."""
    kv_checksum_every: Annotated[int, Meta(ge=0, le=1_000_000)] = 16
    """One of so many transfers is verified by checksums; 0: none."""
    audit_grace_ms: Milliseconds = 2_000
    """A worker without requests that still holds something after that has leaked it."""
    max_resumes: Annotated[int, Meta(ge=0, le=MAX_ATTEMPTS)] = 3
    """Of one request in a row without a new token: it may be what kills its workers."""
    resume_backoff_ms: Milliseconds = 100
    """Before a request goes on that a living replica has lost, since that one may be dying
    (known within 100 ms); doubles with each loss in a row up to `restart_backoff_max_ms`."""
    null_ttl_ms: Milliseconds = 30_000
    """A warm spare that was not used for so long gives up its weights."""
    pair_cap: Count = 4
    """Requests pending on the replica of a live pair that loads; one less every 200 ms, down to
    2."""
    mutate_after_load: Flag = 0
    """1: a decode load ends in MutatingToDecode, as in the ServerlessLLM baseline."""

    # The ladder (`control/ladder.py`): how one more replica of a role is had, the first rung
    # that applies. 1: the rung is on. The last one, reading the disk, always is.
    ladder_mutate: Flag = 1
    """Before it: prefill replicas that are too many turn into decode ones that are missing."""
    ladder_revive: Flag = 1
    """One that still shuts from the role serves on."""
    ladder_reuse: Flag = 1
    """One that is empty and still has the weights serves again."""
    ladder_reuse_any: Flag = 1
    """0: only in the role that it had."""
    ladder_map: Flag = 1
    """The node's pool, the prepared file, is mapped: no second copy."""
    ladder_nvlink: Flag = 1
    """A chain from a replica of the same scale-up domain; its network links do not matter."""
    ladder_shard: Flag = 1
    """Shards over several links of a node at once, gathered there: the original's Tanz. Where
    nodes with several links are described."""
    ladder_chain: Flag = 1
    """A chain from a replica whose egress is free; each that loads forwards what arrives."""
    ladder_p2p: Flag = 1
    """One replica gives the weights to one that loads."""
    ladder_live: Flag = 0
    """A prefill replica that gets its weights from another serves meanwhile, paired with one
    that has them all (`control/pairs.py`)."""
    ladder_live_decode: Flag = 0
    """A decode replica that would have to load is had at once from a prefill one, and it is that
    one's successor that loads."""
    ladder_host: Flag = 0
    """The host's copy is copied: ServerlessLLM's cache, kept for `host_ttl_ms` after a load."""
    ladder_pool: Flag = 1
    """A chain from the memory of the one node that keeps a copy for all, for when no replica
    can give the weights. Of use while they move over the network (`ladder_map` is 0)."""
    host_ttl_ms: OrNone = 30_000
    """0: it is always there."""
    ladder_prefills_give: Flag = 0
    """1: over the network prefill replicas give weights too, though their KV leaves that way."""
    mock_load_ms: Floor = 0
    """Floor under the time of a load from the node itself, for experiments."""
    mock_transfer_ms: Floor = 0
    """Floor under the time of a load from a replica."""
    restart_backoff_ms: Milliseconds = 500
    """Before the second restart in a row; doubles up to `restart_backoff_max_ms`."""
    restart_backoff_max_ms: Milliseconds = 30_000
    request_deadline_ms: Milliseconds = 3_600_000
    """From a request's arrival to its end, waiting and resumes included; a request may ask for
    less. No sane answer takes so long, so that only what nothing will ever serve meets it."""
    drain_ms: Milliseconds = 600_000
    """What a shutting replica's requests may take, unless the command says otherwise."""
    restart_limit_ms: Milliseconds = 600_000
    """A restarted replica that does not serve after so long, beside its drain and its wait
    for a stand-in, is given up."""

    # The planner (`control/planner.py`). Bounds come in pairs: above the high one a role is
    # scaled up, below the low one, for a while, down; one of 0 leaves the term out.
    autoscale: Flag = 0
    """1: the planner decides how many replicas of each role there are."""
    plan_tick_ms: Milliseconds = 250
    """Between two changes of the same plan, and between two records of a wait."""
    scale_down_window_ms: Milliseconds = 5_000
    """A role is scaled down when its load was low for so long."""
    arrival_window_ms: Milliseconds = 5_000
    """The rate of arrivals is an average over so long."""
    manual_hold_ms: OrNone = 0
    """Counts that an operator set stay for so long; 0: until they are released."""
    min_prefill: Count = 1
    max_prefill: Count = 64
    min_decode: Count = 1
    max_decode: Count = 64
    prefill_tokens_per_s: OrNone = 0
    """Of one prefill replica; 0: as observed."""
    transfer_tokens_per_s: OrNone = 0
    """Of KV into one decode replica; 0: as observed."""
    prefill_backlog_high_ms: OrNone = 700
    """How long the replicas would need for the prompts that wait."""
    prefill_backlog_low_ms: OrNone = 500
    prefill_use_high_ppm: OrNone = 800_000
    """Share of their time that arriving prompts take."""
    prefill_use_low_ppm: OrNone = 500_000
    decode_use_high_ppm: OrNone = 800_000
    """Share of KV blocks in use."""
    decode_use_low_ppm: OrNone = 450_000
    transfer_backlog_high_ms: OrNone = 800
    """How long the KV that waits would need to move."""
    transfer_backlog_low_ms: OrNone = 400
    plan_original: Flag = 0
    """1: the original's formulas, tick for tick, to compare with (reference 3.3)."""

    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(msgspec.structs.asdict(self).items()))

    @classmethod
    def of(cls, values: dict[str, int]) -> Self:
        """From recorded values: a name that this version does not know is left out."""
        return cls(**{name: values[name] for name in cls.__struct_fields__ if name in values})

    def conflicts(self) -> list[tuple[str, str]]:
        """(name, what is wrong and what would be accepted) where each value alone is right."""
        found = []
        for high in (n for n in self.__struct_fields__ if "_high_" in n):
            low = high.replace("_high_", "_low_")
            most, least = getattr(self, high), getattr(self, low)
            if most and least >= most:
                found.append((low, f"{low} is {least}; accepted: less than {high}, {most}"))
        for role in ("prefill", "decode"):
            least, most = getattr(self, f"min_{role}"), getattr(self, f"max_{role}")
            if least > most:
                name = f"min_{role}"
                found.append((name, f"{name} is {least}; accepted: up to max_{role}, {most}"))
        return found

    @classmethod
    def bounds(cls) -> dict[str, tuple[int, int]]:
        """The least and the greatest value of each."""
        found = {}
        for field in msgspec.structs.fields(cls):
            [meta] = field.type.__metadata__
            found[field.name] = (meta.ge, meta.le)
        return found
