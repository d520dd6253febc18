"""What two fabrics say to each other besides the bytes.

The receiver is in charge. It posts receives, then grants as many chunks; the sender sends
no chunk that is not granted, so nothing ever arrives unasked. Every granted chunk is
answered by exactly one message, a void one when the transfer was given up, so a posted
receive never waits for nothing and one transfer ends without touching its neighbours.

    receiver                             sender
       GRANT(tag, n) -------------------->
                      <------------------- chunks [0, n)
       ...                                 ...
       DONE(tag)      ------------------->  send() returns
    and when one side gives up:
       CANCEL(tag)    ------------------->
                      <------------------- FAIL(tag, sent), a void for each granted chunk
       DONE(tag)      ------------------->

While two fabrics have anything open with each other, each sends a BEAT when it has said
nothing for a while.
"""

import secrets
import struct
from enum import IntEnum
from typing import NamedTuple

from blitzd.fabric.identity import Identity

TAG_BITS = 56
_DATA = 0xDA << TAG_BITS
CONTROL_TAG = 0xC0 << TAG_BITS
KIND_MASK = 0xFF << TAG_BITS

_CONTROL = struct.Struct("<QQQQQ")
CONTROL_BYTES = _CONTROL.size
_ADDRESS = struct.Struct("<4sQB")
_MAGIC = b"BZU1"


class Kind(IntEnum):
    BEAT = 1
    GRANT = 2
    CANCEL = 3
    FAIL = 4
    DONE = 5


class Control(NamedTuple):
    kind: int
    sender: int
    """The sending fabric's id."""
    tag: int
    value: int
    """Chunks: granted, sent before failing, or taken in."""
    total: int
    """Of a grant: the bytes that the receiver expects. Otherwise 0."""

    def encode(self) -> bytes:
        return _CONTROL.pack(*self)

    @classmethod
    def decode(cls, raw: memoryview) -> "Control":
        return cls(*_CONTROL.unpack(raw))


class Address(NamedTuple):
    """What a fabric's `address` holds: who it is, and where UCX reaches it."""

    identity: Identity
    fabric_id: int
    """Drawn at random when the fabric starts: two lives of one epoch differ in it."""
    worker: bytes

    def encode(self) -> bytes:
        name = str(self.identity).encode()
        return _ADDRESS.pack(_MAGIC, self.fabric_id, len(name)) + name + self.worker

    @classmethod
    def decode(cls, raw: bytes) -> "Address":
        """Raises ValueError when `raw` is not the address of a fabric."""
        if len(raw) < _ADDRESS.size or not raw.startswith(_MAGIC):
            raise ValueError(
                f"peer_address: {len(raw)} bytes, starting {raw[:4]!r}; accepted: the "
                "`address` of another UcxFabric"
            )
        _, fabric_id, length = _ADDRESS.unpack_from(raw)
        name, worker = raw[_ADDRESS.size :][:length], raw[_ADDRESS.size + length :]
        return cls(Identity.parse(name.decode("ascii", "replace")), fabric_id, worker)


def draw_tag() -> int:
    """A tag that no other transfer has, here or anywhere (56 random bits)."""
    return secrets.randbits(TAG_BITS)


def data_tag(tag: int) -> int:
    """The UCX tag of a transfer's chunks. Raises ValueError for a tag nobody drew."""
    if not 0 <= tag < 1 << TAG_BITS:
        raise ValueError(f"tag: {tag}; accepted: what new_tag() returned, below 2**{TAG_BITS}")
    return _DATA | tag
