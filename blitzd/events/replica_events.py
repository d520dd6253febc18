"""Events about replicas (110-199): their workers, loads, roles and pairs."""

from blitzd.events.record import Durability, Kind, Payload, record_type


@record_type(110, Kind.EVENT, Durability.ACK)
class ReplicaRegistered(Payload, frozen=True, array_like=True):
    """The configuration names this replica and its role."""

    replica: str
    node: str
    role: str


@record_type(111, Kind.EVENT, Durability.ACK)
class WorkerSpawning(Payload, frozen=True, array_like=True):
    """The epoch is in the log before the process exists, so that it is never used twice."""

    replica: str
    epoch: int


@record_type(112, Kind.EVENT)
class WorkerSpawned(Payload, frozen=True, array_like=True):
    """The process of this epoch exists."""

    replica: str
    epoch: int
    pid: int


@record_type(113, Kind.EVENT)
class WorkerAttached(Payload, frozen=True, array_like=True):
    """The worker answers; the replica is Inactive, or goes on as it was if it was adopted."""

    replica: str
    epoch: int
    pid: int


@record_type(114, Kind.EVENT)
class WorkerLost(Payload, frozen=True, array_like=True):
    """The replica fails; a new worker may be spawned from `retry_ns` on."""

    replica: str
    epoch: int
    reason: str
    retry_ns: int


@record_type(115, Kind.EVENT, Durability.ACK)
class ReplicaRetired(Payload, frozen=True, array_like=True):
    """The configuration no longer names this replica."""

    replica: str


@record_type(120, Kind.EVENT, Durability.ACK, schema_version=4)
class LoadStarted(Payload, frozen=True, array_like=True):
    """The worker was told to load the model for this role. Weights that come from a replica
    reserve the link between the two until the load ends."""

    replica: str
    epoch: int
    role: str
    source: str
    """A replica, or "map" (the node's file, mapped), "host" (copied from its cache) or "disk"."""
    peers: tuple[tuple[str, int], ...] = ()
    """(replica, epoch): the source, then whom to turn to when it fails."""
    rung: str = ""
    """Of the ladder."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(rung, why it did not apply) of those before it."""
    shards: tuple[tuple[str, int], ...] = ()
    """(replica, epoch) of those that bring a shard each to its domain, itself among them if it
    does; none: the load is not sharded."""


@record_type(121, Kind.EVENT, Durability.LAZY, schema_version=3)
class LoadProgressed(Payload, frozen=True, array_like=True):
    """How many layers and bytes have arrived."""

    replica: str
    epoch: int
    layers_ready: int
    layers_total: int
    bytes_loaded: int
    bytes_total: int
    source: str = ""
    """Another one than the load began with, when that one failed."""
    block_tokens: int = 0
    blocks_total: int = 0
    """Of one that serves while it loads; 0: it does not yet."""


@record_type(122, Kind.EVENT)
class LoadFinished(Payload, frozen=True, array_like=True):
    """All layers are there; the replica takes the state that `trigger` leads to."""

    replica: str
    epoch: int
    digest: str
    source: str
    layers_total: int
    bytes_total: int
    block_tokens: int
    blocks_total: int
    trigger: str = "loaded"
    """The table's: loaded, loaded_to_mutate or loaded_colocated."""


@record_type(123, Kind.EVENT)
class LoadFailed(Payload, frozen=True, array_like=True):
    """The weights did not arrive; another load may begin from `retry_ns` on."""

    replica: str
    epoch: int
    reason: str
    retry_ns: int


@record_type(124, Kind.EVENT, Durability.ACK)
class DecodeOpened(Payload, frozen=True, array_like=True):
    """The replica accepts inbound KV leases from here on."""

    replica: str
    epoch: int


@record_type(125, Kind.EVENT, Durability.ACK, schema_version=2)
class PairOpened(Payload, frozen=True, array_like=True):
    """`new` loads and serves at once; `old` finishes for it. One event moves both. It takes the
    place of a LoadStarted, and reserves the same link."""

    pair_id: int
    new: str
    new_epoch: int
    old: str
    old_epoch: int
    cap: int
    """Requests pending on `new`, at most; less and less while it loads."""
    source: str
    """Where the weights come from, as in LoadStarted."""
    peers: tuple[tuple[str, int], ...] = ()
    rung: str = ""
    """Of the ladder; empty: an operator named the two."""
    skipped: tuple[tuple[str, str], ...] = ()


@record_type(126, Kind.EVENT, Durability.ACK)
class PairSettled(Payload, frozen=True, array_like=True):
    """Both are ordinary prefill replicas."""

    pair_id: int


@record_type(127, Kind.EVENT, Durability.ACK)
class PairBroken(Payload, frozen=True, array_like=True):
    """One side is gone, or the load failed; the other goes on by itself."""

    pair_id: int
    reason: str


@record_type(128, Kind.EVENT, Durability.ACK)
class MutationStarted(Payload, frozen=True, array_like=True):
    """Prefill to decode or back, as the state says."""

    replica: str
    epoch: int
    role: str


@record_type(129, Kind.EVENT, Durability.ACK)
class MutationFinished(Payload, frozen=True, array_like=True):
    """The requests whose KV is here decode here, without a transfer: one event with the
    change of role, so that none of them is without a home."""

    replica: str
    epoch: int
    request_ids: tuple[int, ...]


@record_type(130, Kind.EVENT, Durability.ACK)
class ShutdownStarted(Payload, frozen=True, array_like=True):
    """The replica takes nothing new and finishes what it has, until the deadline."""

    replica: str
    epoch: int
    reason: str
    deadline_ns: int


@record_type(131, Kind.EVENT, Durability.ACK, schema_version=3)
class ReplicaRevived(Payload, frozen=True, array_like=True):
    """A replica that was shutting serves again."""

    replica: str
    epoch: int
    role: str
    trigger: str = "revive"
    """The table's: revive or revive_colocated."""
    rung: str = ""
    """Of the ladder; empty: an operator named the replica."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(rung, why it did not apply) of those before it."""


@record_type(132, Kind.EVENT, Durability.ACK)
class ReplicaEmptied(Payload, frozen=True, array_like=True):
    """Nothing is left on a shutting replica."""

    replica: str
    epoch: int


@record_type(133, Kind.EVENT, Durability.ACK)
class ReplicaExpired(Payload, frozen=True, array_like=True):
    """An idle decode replica was shut in one go."""

    replica: str
    epoch: int
    reason: str


@record_type(134, Kind.EVENT, Durability.ACK, schema_version=2)
class NullReused(Payload, frozen=True, array_like=True):
    """A warm spare serves again, in the role it had or in another."""

    replica: str
    epoch: int
    role: str
    rung: str = ""
    """Of the ladder; empty: an operator named the replica."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(rung, why it did not apply) of those before it."""


@record_type(135, Kind.EVENT, Durability.ACK)
class ReplicaDeactivated(Payload, frozen=True, array_like=True):
    """Its weights are given up. `reason` is "plan" or "ttl"."""

    replica: str
    epoch: int
    reason: str


@record_type(136, Kind.EVENT, Durability.ACK, schema_version=2)
class RoleAssigned(Payload, frozen=True, array_like=True):
    """What an inactive or failed replica is to become. The ladder goes on with its load."""

    replica: str
    role: str
    rung: str = ""
    """Of the ladder; empty: an operator named the replica."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(rung, why it did not apply) of those before the load."""


@record_type(137, Kind.EVENT, Durability.ACK)
class PrefillOpened(Payload, frozen=True, array_like=True):
    """What a replica decoded has ended, or it is left of a live pair and has all layers; it takes
    prompts from here on."""

    replica: str
    epoch: int


@record_type(138, Kind.EVENT, Durability.ACK)
class ScaleSet(Payload, frozen=True, array_like=True):
    """How many replicas of each role are wanted from here on."""

    prefill: int
    decode: int


@record_type(139, Kind.EVENT, Durability.GROUP, schema_version=2)
class CommandRefused(Payload, frozen=True, array_like=True):
    """An operator's command that does not fit the state. Nothing else changed."""

    command: str
    replica: str
    reason: str
    code: str = "conflict"
    """conflict: with the state as it is; unknown_replica; invalid: never accepted."""
    field: str = ""
    """Of the command, if it was one of its values."""


@record_type(140, Kind.EVENT, Durability.ACK)
class RestartStarted(Payload, frozen=True, array_like=True):
    """The worker of this epoch is to be replaced; the replica keeps its role."""

    replica: str
    epoch: int
    drain_ms: int


@record_type(141, Kind.EVENT, Durability.ACK)
class WorkerStopping(Payload, frozen=True, array_like=True):
    """The worker has nothing left to do and is ended; that is no failure."""

    replica: str
    epoch: int
    reason: str


@record_type(142, Kind.EVENT)
class WorkerStopped(Payload, frozen=True, array_like=True):
    """Its process is gone, and the next one may be spawned."""

    replica: str
    epoch: int
    how: str


@record_type(143, Kind.EVENT, Durability.ACK)
class RestartEnded(Payload, frozen=True, array_like=True):
    """The new worker serves as the old one did; or why not, in `reason`."""

    replica: str
    epoch: int
    reason: str
    took_ns: int


@record_type(144, Kind.EVENT, Durability.ACK)
class ReplicaCordoned(Payload, frozen=True, array_like=True):
    """A drain of one that serves nothing new as it is: no plan brings it back."""

    replica: str
    deadline_ns: int
    """Of what still runs there; 0: nothing does."""


@record_type(145, Kind.EVENT, Durability.ACK)
class RollingRestartStarted(Payload, frozen=True, array_like=True):
    """Each worker of one of these (id, epoch) is to be replaced, in turn."""

    replicas: tuple[tuple[str, int], ...]
    drain_ms: int


@record_type(146, Kind.EVENT, Durability.ACK)
class RollingRestartEnded(Payload, frozen=True, array_like=True):
    """All are replaced; or why the rest is not, in `reason`."""

    reason: str


@record_type(147, Kind.EVENT, Durability.ACK)
class StandInCalled(Payload, frozen=True, array_like=True):
    """A spare takes the role of one that restarts and that nobody else has."""

    replica: str
    stands_in_for: str


@record_type(148, Kind.EVENT, Durability.ACK)
class StandInReleased(Payload, frozen=True, array_like=True):
    """The one it stood in for is back, or will not be."""

    replica: str


@record_type(149, Kind.EVENT, Durability.ACK)
class PolicyChanged(Payload, frozen=True, array_like=True):
    """From the next decision on, until the next start."""

    changes: tuple[tuple[str, int, int], ...]
    """(name, old, new)."""
