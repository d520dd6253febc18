"""Record types and logs for the tests of this room."""

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from google_crc32c import extend

from blitzd.events import (
    Disk,
    Kind,
    LogReader,
    LogWriter,
    OsDisk,
    Payload,
    Record,
    record_type,
    upcaster,
)

FIRST_TYPE_ID = 65_000


@record_type(FIRST_TYPE_ID, Kind.EVENT)
class Moved(Payload, frozen=True, array_like=True):
    replica: str
    epoch: int
    layers: tuple[int, ...] = ()


@record_type(FIRST_TYPE_ID + 1, Kind.INPUT)
class Ticked(Payload, frozen=True, array_like=True):
    now_ns: int


@record_type(FIRST_TYPE_ID + 2, Kind.EVENT, must_understand=False)
class Sampled(Payload, frozen=True, array_like=True):
    blocks: int
    note: str = ""


@record_type(FIRST_TYPE_ID + 10, Kind.EVENT, schema_version=3)
class Grown(Payload, frozen=True, array_like=True):
    """Version 1 had only `name`; 2 added `size` in KiB; 3 counts it in bytes and adds
    `note`."""

    name: str
    size_bytes: int = 0
    note: str = ""


@upcaster(Grown.type_id, 1)
def _without_a_size(fields: list[object]) -> list[object]:
    return [*fields, 0]


@upcaster(Grown.type_id, 2)
def _kib_to_bytes(fields: list[object]) -> list[object]:
    name, size_kib = fields
    assert isinstance(size_kib, int)
    return [name, size_kib * 1024]


def record(seq: int, size: int = 0) -> Record:
    """A record that says its own sequence; `size` adds that many bytes of text."""
    payload: Payload
    if seq % 3 == 0:
        payload = Ticked(seq * 1000)
    elif seq % 7 == 0:
        payload = Sampled(seq, "x" * size)
    else:
        payload = Moved(f"replica-{seq % 5}" + "y" * size, seq, (seq, seq + 1))
    return Record(seq, 1_700_000_000_000_000_000 + seq, seq * 10, max(0, seq - 1), payload)


def records(first: int, count: int, size: int = 0) -> list[Record]:
    return [record(seq, size) for seq in range(first, first + count)]


class UnsyncedDisk(OsDisk):
    """For tests in which no power is cut: what was written is what is read, synced or not."""

    def fdatasync(self, fd: int) -> None:
        pass

    def fsync_directory(self, path: Path) -> None:
        pass


def fill(
    directory: Path, batches: Iterable[int], disk: Disk | None = None, **options: int
) -> list[Record]:
    """A log of one boot: one append and sync for each of `batches` (record counts)."""
    writer = LogWriter.open(directory, disk=disk or UnsyncedDisk(), **options)
    written: list[Record] = []
    for count in batches:
        batch = records(writer.last_seq + 1, count)
        writer.append(batch)
        writer.sync()
        written += batch
    writer.close()
    return written


def read(directory: Path, from_seq: int | None = None, disk: Disk | None = None) -> list[Record]:
    return list(LogReader(directory, disk=disk).records(from_seq))


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


def frames(path: Path) -> Iterator[tuple[int, int]]:
    """(start, end) of each frame of a good segment, found without the codec's help."""
    data = path.read_bytes()
    offset = 16 + int.from_bytes(data[8:12], "little")
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 4], "little")
        end = (offset + 52 + length + 7) // 8 * 8
        yield offset, end
        offset = end


def raw_frame(
    type_id: int,
    version: int,
    fields: list[Any],
    *,
    seq: int = 1,
    must_understand: bool = True,
    crc: int = 0,
) -> tuple[bytes, int]:
    """A frame as any version of any daemon may have written it, made from the description
    of the format alone. (frame, its checksum)"""
    payload = msgspec.msgpack.encode(fields)
    flags = 1 | 2 * must_understand
    checked = struct.pack("<HBBQqQQI", type_id, version, flags, seq, seq, seq, 0, seq) + payload
    checked += bytes(-(12 + len(checked)) % 8)
    crc = extend(crc, checked)
    length = len(payload)
    guard = length ^ int.from_bytes(b"BLZF", "little")
    return struct.pack("<III", length, guard, crc) + checked, crc
