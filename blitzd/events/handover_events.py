"""Events about hand-overs of KV: leases under way, the links they go over, and what a worker
that is idle still holds (220-229)."""

from blitzd.events.record import Durability, Kind, Payload, record_type


@record_type(220, Kind.EVENT, Durability.LAZY)
class LeaseExtended(Payload, frozen=True, array_like=True):
    """The importing worker gets on: the lease lives on until then, but not past its cap."""

    lease_id: int
    bytes_moved: int
    expires_ns: int


@record_type(221, Kind.EVENT)
class LinkCooled(Payload, frozen=True, array_like=True):
    """A hand-over over this link failed for a reason of the link's: until then the others are
    preferred, and nothing goes over this one."""

    source: str
    source_epoch: int
    target: str
    target_epoch: int
    lease_id: int
    fault: str
    reason: str
    until_ns: int


@record_type(222, Kind.EVENT)
class LinkReopened(Payload, frozen=True, array_like=True):
    """It has cooled down: one hand-over may try it."""

    source: str
    target: str


@record_type(223, Kind.EVENT)
class LinkHealed(Payload, frozen=True, array_like=True):
    """A hand-over over it succeeded: it is like any other."""

    source: str
    target: str
    lease_id: int


@record_type(224, Kind.EVENT)
class KvMismatched(Payload, frozen=True, array_like=True):
    """KV arrived that is not what the source has: the first such layer, and the xxh3-64 of it
    on both sides, in hex. It was not used."""

    lease_id: int
    layer: int
    source_checksum: str
    target_checksum: str


@record_type(225, Kind.EVENT, Durability.LAZY)
class AuditOpened(Payload, frozen=True, array_like=True):
    """A worker without requests still holds something. It may be about to let go of it."""

    replica: str
    epoch: int
    findings: str


@record_type(226, Kind.EVENT, Durability.LAZY)
class AuditPassed(Payload, frozen=True, array_like=True):
    """It has let go."""

    replica: str
    epoch: int


@record_type(227, Kind.EVENT)
class AuditFailed(Payload, frozen=True, array_like=True):
    """It still holds what nobody needs, and is made to let go: first by cancelling what it
    names, the next time by being restarted. `action` is cancel or restart."""

    replica: str
    epoch: int
    findings: str
    action: str


@record_type(228, Kind.EVENT)
class InvariantBroken(Payload, frozen=True, array_like=True):
    """The state itself does not add up: a defect of ours."""

    problem: str


@record_type(229, Kind.EVENT)
class RequestMoving(Payload, frozen=True, array_like=True):
    """A request that decodes on a replica that shuts goes on elsewhere. `step` is asked (it
    stops after its next token), held (its KV waits for a lease), or stays (it goes on here,
    since it is nearly done or no lease came of it)."""

    request_id: int
    replica: str
    epoch: int
    step: str
    output_tokens: int = 0
    """That the client had when it was asked, or not."""
