"""The form of records for people, exports and `/admin/events`: names, not positions."""

from typing import Any

import msgspec

from blitzd.events.codec import UnknownPayload
from blitzd.events.record import Record


def record_json(record: Record) -> dict[str, Any]:
    """Plain JSON types: {seq, wall_ns, mono_ns, kind, type, cause, payload}."""
    payload = record.payload
    kind = payload.unknown_kind if isinstance(payload, UnknownPayload) else payload.kind
    return {
        "seq": record.seq,
        "wall_ns": record.wall_ns,
        "mono_ns": record.mono_ns,
        "kind": kind.name.lower(),
        "type": type(payload).__name__,
        "cause": record.cause,
        "payload": {
            name: msgspec.to_builtins(getattr(payload, name)) for name in payload.__struct_fields__
        },
    }
