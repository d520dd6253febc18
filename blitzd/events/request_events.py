"""Events about requests and their KV leases (200-299)."""

from blitzd.events.record import Kind, Payload, record_type


@record_type(200, Kind.EVENT, schema_version=2)
class RequestAccepted(Payload, frozen=True, array_like=True):
    """The request is queued; exactly one end will follow."""

    request_id: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    deadline_ns: int
    resumable: int = 1


@record_type(201, Kind.EVENT)
class RequestRejected(Payload, frozen=True, array_like=True):
    """Not accepted, and why. Its only event."""

    request_id: int
    code: str
    reason: str


@record_type(202, Kind.EVENT, schema_version=2)
class PrefillStarted(Payload, frozen=True, array_like=True):
    """The request is granted to a replica that computes its prompt."""

    request_id: int
    replica: str
    epoch: int
    blocks: int
    """Reserved on the replica until the KV has left it."""
    rest: str = ""
    """Of a live pair: who may go on with it (RequestRelayed), its epoch, and what is reserved
    there."""
    rest_epoch: int = 0
    rest_blocks: int = 0


@record_type(203, Kind.EVENT)
class PrefillFinished(Payload, frozen=True, array_like=True):
    """The first token is out. `stays`: it is decoded where it was prefilled (1 or 0)."""

    request_id: int
    stays: int = 0


@record_type(204, Kind.EVENT, schema_version=3)
class MigrationStarted(Payload, frozen=True, array_like=True):
    """Opens a KV lease; the target's blocks are reserved from this event on."""

    lease_id: int
    request_id: int
    source: str
    source_epoch: int
    target: str
    target_epoch: int
    blocks: int
    expires_ns: int
    """Unless the target says before that it gets on."""
    cap_ns: int = 0
    """When it expires even so."""
    rest: str = ""
    """Who has the KV of layers from `split_layer` on; the source has those before."""
    rest_epoch: int = 0
    split_layer: int = 0


@record_type(205, Kind.EVENT)
class MigrationFinished(Payload, frozen=True, array_like=True):
    """The KV has arrived: the lease is closed, the source is free."""

    lease_id: int
    bytes_moved: int
    elapsed_ns: int


@record_type(206, Kind.EVENT)
class MigrationFailed(Payload, frozen=True, array_like=True):
    """The lease is closed, the request is still where it was. Unless the target had no room,
    it is not asked again for the KV of this attempt: it may not know yet that it failed."""

    lease_id: int
    fault: str
    reason: str
    retry_ns: int
    """The request may ask for another lease from then on; 0: it may not."""


@record_type(207, Kind.EVENT)
class RequestFinished(Payload, frozen=True, array_like=True):
    """An end: all tokens were made. The digest is of the output's token ids."""

    request_id: int
    finish: str
    output_tokens: int
    output_digest: str


@record_type(208, Kind.EVENT, schema_version=2)
class RequestFailed(Payload, frozen=True, array_like=True):
    """An end: what the request needed was lost for good, or its time is over."""

    request_id: int
    code: str
    reason: str
    output_tokens: int = 0
    """That the client has got, as the driver counted them."""


@record_type(209, Kind.EVENT)
class RequestCancelled(Payload, frozen=True, array_like=True):
    """An end: its client left."""

    request_id: int
    reason: str


@record_type(210, Kind.EVENT)
class RequestResumed(Payload, frozen=True, array_like=True):
    """What had been computed is lost; the request is queued again, at its old place, to go
    on after the tokens that its client has got. A lease it had is closed."""

    request_id: int
    cause: str
    """worker_lost, handover_failed, engine_error, drain_deadline or links_down."""
    reason: str
    replica: str
    """Where it was lost, and the epoch."""
    epoch: int
    output_tokens: int
    """That the client has got, as the driver counted them. Deciding this turn again takes
    the number from here."""
    retry_ns: int
    """It is not granted before this time."""
