"""The policy: every number that decisions depend on, recorded with each start."""

from typing import Self

import msgspec


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Integers only: milliseconds, tokens, requests, as the names say."""

    max_queued_requests: int = 256
    """More than that are refused with 429."""
    max_prefills_per_replica: int = 8
    """Requests granted to a prefill replica at a time; the rest stays in the daemon's queue."""
    max_imports_per_replica: int = 4
    """KV transfers to a decode replica at a time; 1 is the original's guard."""
    decode_reserve_tokens: int = 256
    """Output tokens that room is reserved for on a decode replica; what a request needs
    beyond that its worker finds as it goes, by preemption if it must."""
    lease_ttl_ms: int = 10_000
    """A KV transfer that takes longer has failed."""
    import_retry_ms: int = 20
    """After a decode replica had no room."""
    null_ttl_ms: int = 30_000
    """A warm spare that was not used for so long gives up its weights."""
    pair_cap: int = 4
    """Requests under way in a live pair."""
    mutate_after_load: int = 0
    """1: a decode load ends in MutatingToDecode, as in the ServerlessLLM baseline."""
    restart_backoff_ms: int = 500
    """Before the second restart in a row; doubles up to `restart_backoff_max_ms`."""
    restart_backoff_max_ms: int = 30_000

    def pairs(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(msgspec.structs.asdict(self).items()))

    @classmethod
    def of(cls, values: dict[str, int]) -> Self:
        """From recorded values: a name that this version does not know is left out."""
        return cls(**{name: values[name] for name in cls.__struct_fields__ if name in values})
