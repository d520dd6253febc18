"""The form of records for people, exports and `/admin/events`: names, not positions."""

from typing import Any

import msgspec

from blitzd.events.record import Record


def record_json(record: Record) -> dict[str, Any]:
    """Plain JSON types: {seq, wall_ns, mono_ns, kind, type, cause, payload}."""
    payload = record.payload
    return {
        "seq": record.seq,
        "wall_ns": record.wall_ns,
        "mono_ns": record.mono_ns,
        "kind": payload.kind.name.lower(),
        "type": type(payload).__name__,
        "cause": record.cause,
        "payload": {
            name: msgspec.to_builtins(getattr(payload, name)) for name in payload.__struct_fields__
        },
    }
