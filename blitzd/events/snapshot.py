"""Snapshots: the folded state at a sequence, so that a start need not read the whole log.

`<sequence, 20 digits>.snap` lies beside the segments: magic, length and checksum of a
JSON header, the header, the state. A damaged one is passed over for the next older; the
log is the truth and a snapshot only a shortcut to it.
"""

import re
import struct
from itertools import pairwise
from pathlib import Path

import msgspec
from google_crc32c import value

from blitzd.events.disk import Disk, OsDisk, read_file, write_file
from blitzd.events.segment import segment_path, segment_seqs

_MAGIC = b"BLITZSNP"
_PREFIX = struct.Struct("<8sII")
_NAME = re.compile(r"(\d{20})\.snap")
SNAPSHOTS_KEPT = 2


class SnapshotHeader(msgspec.Struct, frozen=True):
    seq: int
    state_hash: str
    state_bytes: int
    state_crc: int


class Snapshot(msgspec.Struct, frozen=True):
    seq: int
    """The last record that the state includes."""
    state_hash: str
    state: bytes
    """Opaque to the log."""


def snapshot_path(directory: Path, seq: int) -> Path:
    return directory / f"{seq:020d}.snap"


def snapshot_seqs(disk: Disk, directory: Path) -> list[int]:
    """Sequences of all snapshot files, ascending, whole or not."""
    matches = map(_NAME.fullmatch, disk.names(directory))
    return sorted(int(match[1]) for match in matches if match)


def write_snapshot(directory: Path, snapshot: Snapshot, disk: Disk | None = None) -> None:
    """Leaves a complete, synced file or none. The records up to `snapshot.seq` must have
    been synced before: a snapshot ahead of its log is taken as proof of loss."""
    body = msgspec.json.encode(
        SnapshotHeader(
            snapshot.seq, snapshot.state_hash, len(snapshot.state), value(snapshot.state)
        )
    )
    data = _PREFIX.pack(_MAGIC, len(body), value(body)) + body + snapshot.state
    write_file(disk or OsDisk(), snapshot_path(directory, snapshot.seq), data)


def read_snapshot(disk: Disk, path: Path) -> Snapshot:
    """Raises ValueError, saying what is wrong with it."""
    data = read_file(disk, path)
    if len(data) < _PREFIX.size:
        raise ValueError("shorter than a header")
    magic, length, checksum = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size : _PREFIX.size + length]
    if magic != _MAGIC or len(body) < length or value(body) != checksum:
        raise ValueError("no whole header")
    header = msgspec.json.decode(body, type=SnapshotHeader)
    state = data[_PREFIX.size + length :]
    if len(state) != header.state_bytes or value(state) != header.state_crc:
        raise ValueError("the state's checksum does not match")
    if path.name != snapshot_path(path.parent, header.seq).name:
        raise ValueError(f"its header says sequence {header.seq}")
    return Snapshot(header.seq, header.state_hash, state)


def latest_snapshot(
    directory: Path, at_most: int | None = None, disk: Disk | None = None
) -> Snapshot | None:
    """The newest valid one (with a sequence up to `at_most`), or None."""
    disk = disk or OsDisk()
    for seq in reversed(snapshot_seqs(disk, directory)):
        if at_most is not None and seq > at_most:
            continue
        try:
            return read_snapshot(disk, snapshot_path(directory, seq))
        except ValueError:
            continue
    return None


def apply_retention(
    directory: Path, keep: int = SNAPSHOTS_KEPT, disk: Disk | None = None
) -> list[Path]:
    """Removes all but the newest `keep` valid snapshots, then the segments that lie wholly
    before the oldest one kept. With fewer than `keep` nothing goes. Returns what went."""
    if keep < 2:
        raise ValueError(f"keep is {keep}, accepted: 2 or more (one may turn out damaged)")
    disk = disk or OsDisk()
    valid = []
    for seq in reversed(snapshot_seqs(disk, directory)):
        try:
            read_snapshot(disk, snapshot_path(directory, seq))
        except ValueError:
            continue
        valid.append(seq)
        if len(valid) == keep:
            break
    else:
        return []
    oldest = valid[-1]
    snapshots = snapshot_seqs(disk, directory)
    gone = [snapshot_path(directory, seq) for seq in snapshots if seq < oldest]
    seqs = segment_seqs(disk, directory)
    gone += [
        segment_path(directory, seq) for seq, following in pairwise(seqs) if following <= oldest + 1
    ]
    for path in gone:
        disk.remove(path)
    if gone:
        disk.fsync_directory(directory)
    return gone
