"""Every input of the core, by type id (1-99): what the world told it.

Ids are never reused. Only inputs that led to events are logged, right before them.
"""

from blitzd.events.record import Durability, Kind, Payload, record_type
from blitzd.events.topology_events import NodeLinks


@record_type(1, Kind.INPUT, Durability.ACK, schema_version=2)
class Booted(Payload, frozen=True, array_like=True):
    """The daemon started, with this configuration. `policy` holds (name, value) pairs."""

    boot_epoch: int
    version: str
    node: str
    replicas: tuple[tuple[str, str], ...]
    """(id, role) with role one of prefill, decode, colocated, spare."""
    policy: tuple[tuple[str, int], ...]
    core_version: int
    """Of the decisions: only the same version decides a recorded input again as recorded."""
    adopted: tuple[tuple[str, int, int], ...] = ()
    """(id, epoch, pid) of workers of an earlier boot that still answer."""
    topology: tuple[NodeLinks, ...] = ()
    """In order of the nodes' names."""


@record_type(2, Kind.INPUT, schema_version=2)
class RequestArrived(Payload, frozen=True, array_like=True):
    """A client wants tokens. `seed` was drawn by the driver, so that it can be repeated."""

    request_id: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    deadline_ns: int
    resumable: int = 1
    """When its KV is lost it is computed again elsewhere (1), or fails (0)."""


@record_type(3, Kind.INPUT)
class ClientLeft(Payload, frozen=True, array_like=True):
    """The client has closed its connection, or its time is over."""

    request_id: int


@record_type(4, Kind.INPUT)
class WorkerStarted(Payload, frozen=True, array_like=True):
    """The process exists."""

    replica: str
    epoch: int
    pid: int


@record_type(5, Kind.INPUT)
class WorkerDescribed(Payload, frozen=True, array_like=True):
    """The worker answers on its socket."""

    replica: str
    epoch: int
    pid: int


@record_type(6, Kind.INPUT)
class WorkerExited(Payload, frozen=True, array_like=True):
    """The worker is dead, or was ended because it did not answer."""

    replica: str
    epoch: int
    reason: str


@record_type(7, Kind.INPUT, Durability.LAZY, schema_version=3)
class LoadMoved(Payload, frozen=True, array_like=True):
    """How far a load has come."""

    replica: str
    epoch: int
    layers_ready: int
    layers_total: int
    bytes_loaded: int
    bytes_total: int
    source: str = ""
    """Where the bytes come from now, as the worker says."""
    block_tokens: int = 0
    blocks_total: int = 0
    """Of one that serves while it loads: with them it takes prompts. 0: it does not yet."""


@record_type(8, Kind.INPUT)
class LoadEnded(Payload, frozen=True, array_like=True):
    """`reason` is empty on success."""

    replica: str
    epoch: int
    digest: str
    source: str
    layers_total: int
    bytes_total: int
    block_tokens: int
    blocks_total: int
    reason: str = ""


@record_type(9, Kind.INPUT)
class FirstTokenProduced(Payload, frozen=True, array_like=True):
    """The prompt is computed and the first token is out. `held`: the KV waits for export
    (1), or the worker goes on with it (0)."""

    replica: str
    epoch: int
    request_id: int
    held: int = 1


@record_type(10, Kind.INPUT, schema_version=2)
class ImportEnded(Payload, frozen=True, array_like=True):
    """`fault` is empty on success. Else the target has said no (no_room, refused), or the
    source (not_held, mismatch), or the transfer broke (source: it is gone, or the way to it;
    stalled, corrupt, deadline, target)."""

    lease_id: int
    bytes_moved: int
    elapsed_ns: int
    fault: str = ""
    reason: str = ""
    layer: int = 0
    """With corrupt: the first one that differs, and its checksum on both sides, in hex."""
    source_checksum: str = ""
    target_checksum: str = ""


@record_type(11, Kind.INPUT)
class GenerationEnded(Payload, frozen=True, array_like=True):
    """The worker has made the last token of this request."""

    replica: str
    epoch: int
    request_id: int
    finish: str
    output_tokens: int
    output_digest: str
    """xxh3-64 of the output token ids as little-endian u32, in hex."""


@record_type(12, Kind.INPUT, schema_version=2)
class RequestErrored(Payload, frozen=True, array_like=True):
    """A worker, or a call to it, failed this request."""

    replica: str
    epoch: int
    request_id: int
    reason: str
    attempt: int = 0
    """Resumes of the request before the one that failed."""
    lost: int = 0
    """The worker or the way to it failed, so another may serve the request (1), or the
    request itself cannot be served (0)."""


@record_type(13, Kind.INPUT, Durability.LAZY)
class OccupancyReported(Payload, frozen=True, array_like=True):
    """How full the worker's KV is and how many requests it runs."""

    replica: str
    epoch: int
    blocks_used: int
    running: int


@record_type(14, Kind.INPUT, Durability.LAZY)
class Ticked(Payload, frozen=True, array_like=True):
    """Time passed. What has expired, expires."""


@record_type(15, Kind.INPUT, Durability.ACK)
class StopRequested(Payload, frozen=True, array_like=True):
    """The daemon was told to stop, and how long what is running may take."""

    reason: str
    deadline_ns: int


@record_type(16, Kind.INPUT, Durability.ACK)
class DrainRequested(Payload, frozen=True, array_like=True):
    """An operator wants this replica to finish what it has and take nothing new."""

    replica: str
    deadline_ns: int


@record_type(17, Kind.INPUT, Durability.ACK)
class UndrainRequested(Payload, frozen=True, array_like=True):
    """An operator wants this replica to serve again."""

    replica: str


@record_type(18, Kind.INPUT, Durability.ACK)
class RoleRequested(Payload, frozen=True, array_like=True):
    """An operator wants this replica to be prefill, decode, colocated or spare."""

    replica: str
    role: str


@record_type(19, Kind.INPUT, Durability.ACK)
class LivePairRequested(Payload, frozen=True, array_like=True):
    """An operator wants `new` to serve while it loads, with `old` finishing for it."""

    new: str
    old: str


@record_type(20, Kind.INPUT, Durability.ACK)
class ScaleRequested(Payload, frozen=True, array_like=True):
    """An operator wants so many replicas of each role."""

    prefill: int
    decode: int


@record_type(22, Kind.INPUT, Durability.ACK)
class DeactivateRequested(Payload, frozen=True, array_like=True):
    """An operator wants an empty replica to give up its weights."""

    replica: str


@record_type(21, Kind.INPUT)
class PairDrained(Payload, frozen=True, array_like=True):
    """The new side of a live pair has nothing left that the old side has to finish. In logs
    of before FollowEnded, which takes its place."""

    replica: str
    epoch: int
    pair_id: int


@record_type(23, Kind.INPUT, Durability.LAZY)
class TokensOutdated(Payload, frozen=True, array_like=True):
    """Tokens of an attempt that is over, from a worker that had not heard of its end or was
    stopped meanwhile. They went nowhere."""

    replica: str
    epoch: int
    rows: int


@record_type(25, Kind.INPUT, Durability.ACK)
class RestartRequested(Payload, frozen=True, array_like=True):
    """An operator wants this replica's worker to be replaced by a new process."""

    replica: str
    drain_ms: int
    """How long it may wait: for a stand-in, then for its requests. 0: drain_ms of the policy."""


@record_type(26, Kind.INPUT, Durability.ACK)
class RollingRestartRequested(Payload, frozen=True, array_like=True):
    """An operator wants every worker replaced, one of each role at a time."""

    drain_ms: int
    """Of each replica, as in RestartRequested."""


@record_type(27, Kind.INPUT, Durability.ACK, schema_version=2)
class PolicyRequested(Payload, frozen=True, array_like=True):
    """An operator wants other numbers in the policy, until the next start."""

    values: tuple[tuple[str, int], ...]
    preset: str = ""
    """The name, or names with commas, of a baseline; `values` go over it."""


@record_type(29, Kind.INPUT, Durability.ACK)
class RollingRestartStopRequested(Payload, frozen=True, array_like=True):
    """An operator wants no more workers replaced than those that are being."""


@record_type(28, Kind.INPUT, Durability.ACK)
class RemoveRequested(Payload, frozen=True, array_like=True):
    """An operator wants one replica less of this one's role, and this one to go."""

    replica: str


@record_type(35, Kind.INPUT, Durability.ACK)
class ReleaseRequested(Payload, frozen=True, array_like=True):
    """An operator gives the counts of replicas back to the planner."""


@record_type(30, Kind.INPUT, Durability.LAZY)
class ImportProgressed(Payload, frozen=True, array_like=True):
    """The importing worker gets on."""

    lease_id: int
    bytes_moved: int


@record_type(31, Kind.INPUT, Durability.LAZY)
class HoldingsReported(Payload, frozen=True, array_like=True):
    """Everything that a worker could leak, as it says itself."""

    replica: str
    epoch: int
    blocks: int
    held: tuple[tuple[int, int], ...]
    """(request, attempt), in whatever phase, imports included; the first 64."""
    exports: tuple[tuple[int, int], ...]
    """Those that a target has a lease for."""
    transfers: int
    buffers: int
    """Of ended transfers, that UCX has yet to let go of."""
    peers: tuple[str, ...]
    """ID/EPOCH, each mapped or at the end of a UCX endpoint."""


@record_type(32, Kind.INPUT, Durability.LAZY)
class StateAudited(Payload, frozen=True, array_like=True):
    """The state was held against its invariants while nothing ran, and broke some."""

    problems: tuple[str, ...]


@record_type(33, Kind.INPUT)
class DecodeHeld(Payload, frozen=True, array_like=True):
    """The worker has stopped decoding the request and holds its KV."""

    replica: str
    epoch: int
    request_id: int


@record_type(50, Kind.INPUT, Durability.ACK)
class AgentJoined(Payload, frozen=True, array_like=True):
    """The agent of another node is in contact: new, restarted, or back within its lease."""

    node: str
    epoch: int
    """Counts the starts of the agent."""
    address: str
    version: str
    arch: str
    cpus: int
    memory_mib: int
    replicas: tuple[tuple[str, str], ...]
    """(id, role) that the node offers, as in Booted."""


@record_type(51, Kind.INPUT, Durability.ACK)
class AgentLost(Payload, frozen=True, array_like=True):
    """The agent has taken its leave, or its lease has run out."""

    node: str
    epoch: int
    reason: str


@record_type(55, Kind.INPUT)
class WorkerFound(Payload, frozen=True, array_like=True):
    """A worker of an awaited node answers. Without a digest it has no weights."""

    replica: str
    epoch: int
    pid: int
    digest: str
    layers_total: int
    bytes_total: int
    block_tokens: int
    blocks_total: int


@record_type(52, Kind.INPUT)
class PoolCopyEnded(Payload, frozen=True, array_like=True):
    """The worker holds the model for others; or not, for this reason."""

    replica: str
    epoch: int
    bytes_total: int
    reason: str = ""
