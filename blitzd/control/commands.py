"""What the core asks the driver to do. Results come back as inputs."""

import msgspec

MAX_ATTEMPTS = 256
"""Of one request; an attempt's number has a byte of the id that workers know."""


class SpawnWorker(msgspec.Struct, frozen=True):
    replica: str
    epoch: int
    node: str = ""
    """Whose agent starts it; empty: this node does."""


class EndWorker(msgspec.Struct, frozen=True):
    """Ends the process, whatever it does."""

    replica: str
    epoch: int
    report: bool = False
    """Whether its exit is to be told, as that of one that died."""


class ResetWorker(msgspec.Struct, frozen=True):
    """Forget every request, since an adopted worker may hold some of the last boot; with
    `unload` the weights too."""

    replica: str
    epoch: int
    unload: bool = False


class LoadModel(msgspec.Struct, frozen=True):
    replica: str
    epoch: int
    peers: tuple[tuple[str, int], ...] = ()
    """(replica, epoch) of those that give the weights, nearest first; none: the node's file."""
    rung: str = "map"
    """Of the ladder; without peers, how the file is taken: map, host or disk."""
    floor_ms: int = 0
    """The load takes at least so long."""
    live: bool = False
    """It serves while the weights come, which takes peers: with the first progress message it
    says its blocks (LoadMoved), and is given prompts."""
    shards: tuple[tuple[str, int], ...] = ()
    """(replica, epoch) of those that bring a shard each to its domain; not of a live load."""
    chunk_bytes: int = 0
    """Of what comes over the network, a message; 0: as many as the transport takes."""


class FollowLive(msgspec.Struct, frozen=True):
    """Old of a live pair is to take requests over from New whenever it has nothing else to do.
    Comes after New's first progress message; again after an end with a fault. What it ends
    with is told as FollowEnded, once for each command."""

    pair_id: int
    old: str
    old_epoch: int
    new: str
    new_epoch: int


class HoldWeights(msgspec.Struct, frozen=True):
    """Have the model in memory, to give it to others. A reset with `unload` ends that."""

    replica: str
    epoch: int


class StartPrefill(msgspec.Struct, frozen=True):
    replica: str
    epoch: int
    request_id: int
    hold: bool
    """Keep the KV for export after the first token, instead of going on. Always so on a replica
    that serves while it loads, also for a request of one token."""
    attempt: int = 0
    """Of the request; a worker may still have an earlier one, which is another to it."""


class DecodeLocally(msgspec.Struct, frozen=True):
    """Go on with a request whose KV was held for export."""

    replica: str
    epoch: int
    request_id: int
    attempt: int = 0


class ImportKv(msgspec.Struct, frozen=True):
    lease_id: int
    request_id: int
    source: str
    source_epoch: int
    target: str
    target_epoch: int
    stall_ms: int
    """The target gives up when no byte came for so long."""
    cap_ms: int
    """It gives up after that, whatever comes."""
    checksums: bool
    """Compare each layer's with the source's."""
    attempt: int = 0
    rest: str = ""
    """Of a request that two replicas prefilled: who has the KV of layers from `split_layer` on.
    The source has layers [0, `split_layer`)."""
    rest_epoch: int = 0
    split_layer: int = 0


class HoldDecode(msgspec.Struct, frozen=True):
    """Stop decoding after the next token and keep the KV for export."""

    replica: str
    epoch: int
    request_id: int
    attempt: int = 0


class ReleaseKv(msgspec.Struct, frozen=True):
    """The KV has arrived elsewhere; the source may forget it. One each for two halves."""

    replica: str
    epoch: int
    request_id: int
    attempt: int = 0


class CancelRequest(msgspec.Struct, frozen=True):
    replica: str
    epoch: int
    request_id: int
    attempt: int = 0


class ShutDown(msgspec.Struct, frozen=True):
    """Everything accepted has ended: end the workers and the daemon."""


Command = (
    SpawnWorker
    | EndWorker
    | ResetWorker
    | LoadModel
    | FollowLive
    | HoldWeights
    | StartPrefill
    | DecodeLocally
    | HoldDecode
    | ImportKv
    | ReleaseKv
    | CancelRequest
    | ShutDown
)


def waits_for_the_log(command: Command) -> bool:
    """Whether it begins something; or ends a worker by plan, which must come after its
    start. The others only end or free, which is right whatever the log says."""
    if isinstance(command, EndWorker):
        return command.report
    return isinstance(command, _BEGINS)


_BEGINS = (
    SpawnWorker
    | LoadModel
    | FollowLive
    | HoldWeights
    | StartPrefill
    | DecodeLocally
    | HoldDecode
    | ImportKv
)
