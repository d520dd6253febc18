"""The append-only log: event types, codec, segments, snapshots, retention.

Promises: what `append` accepted survives the death of the process and what `sync` returned
for survives a power cut; an append is all or nothing; a damaged log is refused with file,
offset and what would be lost, never read as something else; the same record has the same
payload bytes.
"""

from blitzd.events.codec import UnknownPayload, upcaster
from blitzd.events.disk import Disk, OsDisk
from blitzd.events.errors import (
    LogCorrupt,
    LogError,
    LogLocked,
    LogUnavailable,
    RecordRefused,
    UnknownRecord,
)
from blitzd.events.reader import LogCursor, LogReader
from blitzd.events.record import Durability, Kind, Payload, Record, record_type
from blitzd.events.segment import log_directory
from blitzd.events.snapshot import Snapshot, apply_retention, latest_snapshot, write_snapshot
from blitzd.events.writer import Identity, LogStatus, LogWriter

__all__ = [
    "Disk",
    "Durability",
    "Identity",
    "Kind",
    "LogCorrupt",
    "LogCursor",
    "LogError",
    "LogLocked",
    "LogReader",
    "LogStatus",
    "LogUnavailable",
    "LogWriter",
    "OsDisk",
    "Payload",
    "Record",
    "RecordRefused",
    "Snapshot",
    "UnknownPayload",
    "UnknownRecord",
    "apply_retention",
    "latest_snapshot",
    "log_directory",
    "record_type",
    "upcaster",
    "write_snapshot",
]
