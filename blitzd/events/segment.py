"""Segment files: their names, their headers, and one pass over their frames.

`<first sequence, 20 digits>.log` starts with a header (magic, length, checksum, JSON) and
goes on with frames. A header names the segment before it and that one's final checksum,
so a missing, foreign or doubled file shows without reading any frame.
"""

import re
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec
from google_crc32c import value

from blitzd.events.codec import MAX_APPEND_BYTES, Chain, Fault, scan
from blitzd.events.disk import Disk
from blitzd.events.errors import LogError

FORMAT_VERSION = 1
SUFFIX = ".log"
_MAGIC = b"BLITZLOG"
_PREFIX = struct.Struct("<8sII")
"""Magic, bytes of JSON, CRC32C of the JSON."""
_HEADER_MAX_BYTES = 1 << 16
_NAME = re.compile(r"(\d{20})\.log")
WINDOW_BYTES = 1 << 20


class SegmentHeader(msgspec.Struct, frozen=True):
    daemon_version: str
    config_digest: str
    node_id: str
    boot_epoch: int
    """Counts the openings of this log by a writer, from 1."""
    first_seq: int
    previous_first_seq: int
    """Names the segment before; 0: there never was one."""
    previous_crc: int
    """The checksum that the first frame continues."""
    format_version: int = FORMAT_VERSION

    @property
    def chain(self) -> Chain:
        return Chain(self.previous_crc, self.first_seq)


class Stretch(NamedTuple):
    """The good part of a segment."""

    end: int
    """Offset behind the last complete append."""
    chain: Chain
    size: int
    fault: Fault | None


def log_directory(directory: Path) -> Path:
    """Where the segments are, given a state directory or its log/."""
    inner = directory / "log"
    return inner if inner.is_dir() else directory


def segment_path(directory: Path, first_seq: int) -> Path:
    return directory / f"{first_seq:020d}{SUFFIX}"


def segment_seqs(disk: Disk, directory: Path) -> list[int]:
    """First sequences of all segments, ascending. Raises LogError for a file that ends in
    .log and is none of ours: it may be a copy of one that is missing."""
    seqs = []
    for name in sorted(disk.names(directory)):
        if not name.endswith(SUFFIX):
            continue
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) == 0:
            raise LogError(
                f"{directory / name}: a segment's name is 20 digits and .log; move it away, or "
                "give it its name back if a segment is missing"
            )
        seqs.append(int(match[1]))
    return seqs


def segment_sizes(disk: Disk, directory: Path) -> dict[int, int]:
    """Bytes of each segment, by first sequence, ascending."""
    sizes = {}
    for seq in segment_seqs(disk, directory):
        fd = disk.open(segment_path(directory, seq))
        sizes[seq] = disk.size(fd)
        disk.close(fd)
    return sizes


def encode_header(header: SegmentHeader) -> bytes:
    body = msgspec.json.encode(header) + b"\n"
    body += b" " * (-(len(body) + _PREFIX.size) & 7)
    if len(body) > _HEADER_MAX_BYTES:
        raise LogError(f"a segment header of {len(body)} bytes, accepted: {_HEADER_MAX_BYTES}")
    return _PREFIX.pack(_MAGIC, len(body), value(body)) + body


def read_header(disk: Disk, fd: int, path: Path) -> tuple[SegmentHeader, int]:
    """The header and the offset of the first frame. Raises ValueError, saying what is wrong
    with it; LogError when the format is not this version's."""
    prefix = disk.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise ValueError(f"the file ends inside the segment header, after {len(prefix)} bytes")
    magic, length, checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC or length > _HEADER_MAX_BYTES:
        raise ValueError("no segment header")
    body = disk.pread(fd, length, _PREFIX.size)
    if len(body) < length or value(body) != checksum:
        raise ValueError("the segment header's checksum does not match")
    version = msgspec.json.decode(body).get("format_version")
    if version != FORMAT_VERSION:
        raise LogError(f"{path}: log format {version}, this version reads {FORMAT_VERSION}")
    header = msgspec.json.decode(body, type=SegmentHeader)
    if header.first_seq != int(path.name[:20]):
        raise ValueError(f"its header says that it begins at record {header.first_seq}: a copy")
    return header, _PREFIX.size + length


def walk(disk: Disk, fd: int, offset: int, chain: Chain, before_seq: int | None = None) -> Stretch:
    """Checks every frame from `offset` to the end of the file (or to `before_seq`)."""
    window = WINDOW_BYTES
    while True:
        buffer = disk.pread(fd, window, offset)
        taken = scan(buffer, 0, chain, before_seq)
        size = offset + len(buffer)
        offset, chain = offset + taken.offset, taken.chain
        if taken.fault is not None:
            fault = taken.fault._replace(offset=size - len(buffer) + taken.fault.offset)
            return Stretch(offset, chain, disk.size(fd), fault)
        if chain.next_seq == before_seq or len(buffer) < window:
            return Stretch(offset, chain, size, None)
        if taken.offset == 0:
            if window > 2 * MAX_APPEND_BYTES:
                fault = Fault(offset, chain, "an append that does not end")
                return Stretch(offset, chain, disk.size(fd), fault)
            window *= 2
