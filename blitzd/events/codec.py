"""Records to frames and back.

A frame, little-endian, starts on an 8-byte border:

    0  u32  payload length
    4  u32  the same length XOR MAGIC: one aligned word that is never half written,
            so a length that can be read can be trusted
    8  u32  CRC32C of bytes 12 to the end, continued from the frame before
    12 u16  type id
    14 u8   schema version
    15 u8   flags: event, must-understand, more-of-this-append-follows
    16 u64  sequence, gap-free
    24 i64  wall clock, ns
    32 u64  monotonic clock, ns
    40 u64  cause
    48 u32  how many sequences before this one were on disk when it was written; tells
            after a power cut whether a broken frame had ever been acknowledged
    52      payload: msgpack array of the struct's fields, then zeros to the border
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from google_crc32c import extend

from blitzd.events.errors import RecordRefused, UnknownRecord
from blitzd.events.record import REGISTRY, Kind, Payload, Record

MAGIC = int.from_bytes(b"BLZF", "little")
FRAME = struct.Struct("<IIIIQqQQI")
CHECKED = struct.Struct("<IQqQQI")
"""What the checksum covers of the header: FRAME from byte 12 on."""
WORD = struct.Struct("<III")
"""Length, its guard, checksum."""
HEADER_BYTES = FRAME.size
UNCHECKED_BYTES = WORD.size
MAX_PAYLOAD_BYTES = 1 << 20
MAX_APPEND_BYTES = 8 << 20
"""One append is one unit of recovery, so a reader must be able to hold it."""
MAX_SCHEMA_VERSION = 255

EVENT = 1 << 24
MUST_UNDERSTAND = 1 << 25
MORE = 1 << 31
"""In the word of type, version and flags. MORE is the top bit, so one comparison tests it."""

_LAG_MAX = (1 << 32) - 1
_PADDING = tuple(bytes(n) for n in range(8))


class UnknownPayload(Payload, frozen=True):
    """A record whose type or version this daemon does not know."""

    unknown_type: int
    unknown_version: int
    unknown_kind: Kind
    needed: bool
    """Must be understood: only a forensic reader gives it."""
    raw: bytes


class Chain(NamedTuple):
    """Where a log stands between two frames."""

    crc: int
    next_seq: int


_encode_payload = msgspec.msgpack.Encoder().encode


def _class_word(cls: type[Payload]) -> int:
    if REGISTRY.get(cls.type_id) is not cls:
        raise RecordRefused(f"{cls.__name__} is not a registered record type")
    if not 1 <= cls.schema_version <= MAX_SCHEMA_VERSION:
        raise RecordRefused(
            f"{cls.__name__}: schema version {cls.schema_version}, "
            f"accepted: 1 to {MAX_SCHEMA_VERSION}"
        )
    word = cls.type_id | cls.schema_version << 16
    if cls.kind is Kind.EVENT:
        word |= EVENT
    if cls.must_understand:
        word |= MUST_UNDERSTAND
    return word


_class_words: dict[type[Payload], int] = {}


def encode_batch(records: Sequence[Record], chain: Chain, durable_seq: int) -> tuple[bytes, Chain]:
    """The frames of one append, and the chain after them.

    `durable_seq`: up to where the log is known to be on disk. Raises RecordRefused, naming
    the record and the field; the chain is then as before.
    """
    crc, seq = chain
    last = seq + len(records) - 1
    out: list[bytes] = []
    for record in records:
        payload = record.payload
        cls = type(payload)
        word = _class_words.get(cls)
        if word is None:
            word = _class_words[cls] = _class_word(cls)
        if record.seq != seq:
            raise RecordRefused(f"{cls.__name__}: seq {record.seq}, accepted: {seq}")
        try:
            body = _encode_payload(payload)
            length = len(body)
            checked = CHECKED.pack(
                word if seq == last else word | MORE,
                seq,
                record.wall_ns,
                record.mono_ns,
                record.cause,
                min(seq - durable_seq, _LAG_MAX),
            )
        except (struct.error, TypeError, OverflowError, UnicodeEncodeError) as error:
            raise RecordRefused(_why_not(record, error)) from error
        if length > MAX_PAYLOAD_BYTES:
            raise RecordRefused(
                f"record {seq} ({cls.__name__}): payload of {length} bytes, "
                f"accepted: up to {MAX_PAYLOAD_BYTES}"
            )
        checked += body + _PADDING[-(HEADER_BYTES + length) & 7]
        crc = extend(crc, checked)
        out.append(WORD.pack(length, length ^ MAGIC, crc))
        out.append(checked)
        seq += 1
    data = b"".join(out)
    if len(data) > MAX_APPEND_BYTES:
        raise RecordRefused(
            f"an append of {len(data)} bytes ({len(records)} records), "
            f"accepted: up to {MAX_APPEND_BYTES}"
        )
    return data, Chain(crc, seq)


def _why_not(record: Record, error: Exception) -> str:
    name = f"record {record.seq} ({type(record.payload).__name__})"
    for field, low, high in (
        ("wall_ns", -(1 << 63), (1 << 63) - 1),
        ("mono_ns", 0, (1 << 64) - 1),
        ("cause", 0, (1 << 64) - 1),
    ):
        value = getattr(record, field)
        if type(value) is not int or not low <= value <= high:
            return f"{name}: {field} is {value!r}, accepted: an integer from {low} to {high}"
    return f"{name}: {error}"


Upcast = Callable[[list[Any]], list[Any]]
UPCASTERS: dict[tuple[int, int], Upcast] = {}


def upcaster(type_id: int, from_version: int) -> Callable[[Upcast], Upcast]:
    """Registers what turns the field array of `from_version` into that of the next one.

    Only needed where a default for the new last field does not say it. A type that has one
    has one from every earlier version, so that each gets all the fields it knows of.
    """

    def register(function: Upcast) -> Upcast:
        if (type_id, from_version) in UPCASTERS:
            raise ValueError(f"type id {type_id} has an upcaster from version {from_version}")
        if from_version > 1 and (type_id, from_version - 1) not in UPCASTERS:
            raise ValueError(f"type id {type_id} has no upcaster from version {from_version - 1}")
        UPCASTERS[type_id, from_version] = function
        return function

    return register


PayloadDecoder = Callable[[bytes], Payload]


def _upcasting_decoder(cls: type[Payload], version: int) -> PayloadDecoder:
    def decode(raw: bytes) -> Payload:
        fields = msgspec.msgpack.decode(raw)
        for old in range(version, cls.schema_version):
            step = UPCASTERS.get((cls.type_id, old))
            if step is not None:
                fields = step(fields)
        return msgspec.convert(fields, cls)

    return decode


class Fault(NamedTuple):
    """A frame that cannot be taken though its bytes are there."""

    offset: int
    chain: Chain
    reason: str


class Taken(NamedTuple):
    """What one pass over a buffer gave. With no fault, the buffer just ends."""

    offset: int
    """Behind the last complete append."""
    chain: Chain
    fault: Fault | None


NO_FRAME = "no frame starts here"


class FrameDecoder:
    """Decodes buffers of frames. `forensic`: unknown must-understand records come as
    UnknownPayload instead of being refused, and appends need not be complete."""

    def __init__(self, *, forensic: bool = False) -> None:
        self._forensic = forensic
        self._decoders: dict[int, PayloadDecoder] = {}
        self.has_unknown = False
        """Whether any UnknownPayload was made."""

    def decode(self, buffer: bytes, offset: int, chain: Chain) -> tuple[list[Record], Taken]:
        """Takes complete appends from `offset` on. Raises UnknownRecord."""
        crc, expected = chain
        end = len(buffer)
        records: list[Record] = []
        keep = records.append
        unpack, checksum, decoders = FRAME.unpack_from, extend, self._decoders
        magic, limit, more = MAGIC, MAX_PAYLOAD_BYTES, MORE
        opened: tuple[int, int, int, int] | None = None
        reason = None
        while offset + HEADER_BYTES <= end:
            length, guard, stored, word, seq, wall, mono, cause, _ = unpack(buffer, offset)
            if length ^ guard != magic or length > limit:
                reason = NO_FRAME
                break
            stop = offset + HEADER_BYTES + length
            following = stop + 7 & -8
            if following > end:
                break
            found = checksum(crc, buffer[offset + UNCHECKED_BYTES : following])
            if found != stored or seq != expected:
                reason = _mismatch(found, stored, seq, expected)
                break
            if word >= more:
                word -= more
                if opened is None:
                    opened = offset, crc, seq, len(records)
            else:
                opened = None
            decode = decoders.get(word)
            if decode is None:
                decode = decoders[word] = self._payload_decoder(word, seq)
            try:
                payload = decode(buffer[offset + HEADER_BYTES : stop])
            except msgspec.DecodeError as error:
                reason = f"the payload of type id {word & 0xFFFF} does not decode: {error}"
                break
            keep(Record(seq, wall, mono, cause, payload))
            crc, expected, offset = found, seq + 1, following
        here = Chain(crc, expected)
        fault = Fault(offset, here, reason) if reason else None
        if opened is None or self._forensic:
            return records, Taken(offset, here, fault)
        offset, crc, expected, count = opened
        return records[:count], Taken(offset, Chain(crc, expected), fault)

    def _payload_decoder(self, word: int, seq: int) -> PayloadDecoder:
        type_id, version = word & 0xFFFF, word >> 16 & 0xFF
        cls = REGISTRY.get(type_id)
        if cls is not None and version <= cls.schema_version:
            if not any((type_id, old) in UPCASTERS for old in range(version, cls.schema_version)):
                return msgspec.msgpack.Decoder(cls).decode
            return _upcasting_decoder(cls, version)
        if word & MUST_UNDERSTAND and not self._forensic:
            known = f"{cls.__name__} up to version {cls.schema_version}" if cls else "no such type"
            raise UnknownRecord(seq, type_id, version, known)
        self.has_unknown = True
        kind = Kind.EVENT if word & EVENT else Kind.INPUT
        needed = bool(word & MUST_UNDERSTAND)
        return lambda raw: UnknownPayload(type_id, version, kind, needed, raw)


def scan(buffer: bytes, offset: int, chain: Chain, before_seq: int | None = None) -> Taken:
    """As `FrameDecoder.decode` without looking at payloads: three times as fast.

    Ends at the frame of `before_seq`, even inside an append, if that is given.
    """
    crc, expected = chain
    end = len(buffer)
    unpack, checksum = FRAME.unpack_from, extend
    opened: tuple[int, int, int] | None = None
    reason = None
    while offset + HEADER_BYTES <= end:
        if expected == before_seq:
            return Taken(offset, Chain(crc, expected), None)
        length, guard, stored, word, seq, _, _, _, _ = unpack(buffer, offset)
        if length ^ guard != MAGIC or length > MAX_PAYLOAD_BYTES:
            reason = NO_FRAME
            break
        following = offset + HEADER_BYTES + length + 7 & -8
        if following > end:
            break
        found = checksum(crc, buffer[offset + UNCHECKED_BYTES : following])
        if found != stored or seq != expected:
            reason = _mismatch(found, stored, seq, expected)
            break
        if word < MORE:
            opened = None
        elif opened is None:
            opened = offset, crc, seq
        crc, expected, offset = found, seq + 1, following
    here = Chain(crc, expected)
    fault = Fault(offset, here, reason) if reason else None
    if opened is None:
        return Taken(offset, here, fault)
    offset, crc, expected = opened
    return Taken(offset, Chain(crc, expected), fault)


def _mismatch(found: int, stored: int, seq: int, expected: int) -> str:
    if found != stored:
        return f"checksum is {stored:#010x}, the bytes give {found:#010x}"
    return f"sequence is {seq}, expected {expected}"
