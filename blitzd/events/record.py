"""What a log holds: records, each an input of the core or an event it decided.

A record type is a frozen, array-like struct registered under a number that is never
used again. A field may be added at the end with a default and a new schema version;
nothing else about a type may change (`reference`: etcd and protobuf practice).
"""

from collections.abc import Callable
from enum import IntEnum
from typing import ClassVar, TypeVar

import msgspec


class Durability(IntEnum):
    """When a record must be on disk (see `LogWriter`)."""

    ACK = 0
    """Synced before anything acts on it: scale commands, role changes, deadlines."""
    GROUP = 1
    """Written before acting, synced within 10 ms: the life of a request."""
    LAZY = 2
    """Written before acting, synced with the next group: samples."""


class Kind(IntEnum):
    INPUT = 0
    EVENT = 1


class Payload(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=False, gc=False):
    """Base of every input and event. Fields are integers, strings, or tuples of them, so
    no reference cycle can go through one and the collector need not look (half the time
    of a replay)."""

    type_id: ClassVar[int] = 0
    kind: ClassVar[Kind] = Kind.EVENT
    schema_version: ClassVar[int] = 1
    durability: ClassVar[Durability] = Durability.GROUP
    must_understand: ClassVar[bool] = True


class Record(msgspec.Struct, frozen=True, gc=False):
    """One log entry: the envelope and its payload."""

    seq: int
    """Gap-free over the life of the log, from 1."""
    wall_ns: int
    """Unix time. May jump backwards; only for people."""
    mono_ns: int
    """The core's clock: never backwards within one boot of the daemon."""
    cause: int
    """Sequence of the record that led to this one; 0 when it came from outside."""
    payload: Payload


PayloadType = TypeVar("PayloadType", bound=type[Payload])

REGISTRY: dict[int, type[Payload]] = {}


def record_type(
    type_id: int,
    kind: Kind,
    durability: Durability = Durability.GROUP,
    schema_version: int = 1,
    must_understand: bool = True,
) -> Callable[[PayloadType], PayloadType]:
    """Registers a payload class under `type_id` (1 to 65535, never reused)."""

    def register(cls: PayloadType) -> PayloadType:
        if type_id in REGISTRY:
            raise ValueError(f"type id {type_id} belongs to {REGISTRY[type_id].__name__}")
        cls.type_id = type_id
        cls.kind = kind
        cls.durability = durability
        cls.schema_version = schema_version
        cls.must_understand = must_understand
        REGISTRY[type_id] = cls
        return cls

    return register
