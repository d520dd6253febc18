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

A fabric with anything open pings its peer, which answers whether or not it was asked for
anything yet: silence means that the process, or the way to it, is stuck. A ping carries the
sender's address, so that the other connects back, and each has the other's death reported.
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

_CONTROL = struct.Struct("<QQQQQI")
CONTROL_BYTES = 4096
"""The largest control message: a ping from a machine with many network devices."""
_ADDRESS = struct.Struct("<4sQB")
_MAGIC = b"BZU1"


class Kind(IntEnum):
    PING = 1
    PONG = 2
    GRANT = 3
    CANCEL = 4
    FAIL = 5
    DONE = 6


class Control(NamedTuple):
    kind: int
    sender: int
    """The sending fabric's id."""
    tag: int = 0
    value: int = 0
    """Chunks: granted, sent before failing, or taken in."""
    total: int = 0
    """What a receiver expects in all, in bytes. Of a sender 0."""
    address: bytes = b""
    """Of a ping: the sender's."""

    def encode(self) -> bytes:
        return _CONTROL.pack(*self[:-1], len(self.address)) + self.address

    @classmethod
    def decode(cls, raw: bytes) -> "Control":
        kind, sender, tag, value, total, length = _CONTROL.unpack_from(raw)
        return cls(kind, sender, tag, value, total, raw[_CONTROL.size :][:length])


class Address(NamedTuple):
    """What a fabric's `address` holds: who it is, and where UCX reaches it."""

    identity: Identity
    fabric_id: int
    """Drawn at random when the fabric starts: two lives of one epoch differ in it."""
    worker: bytes

    def encode(self) -> bytes:
        """Raises ValueError when UCX has more devices than fit a ping."""
        name = str(self.identity).encode()
        if len(name) + len(self.worker) + 64 > CONTROL_BYTES:
            raise ValueError(
                f"UCX's address has {len(self.worker)} bytes; accepted: {CONTROL_BYTES - 200}; "
                "name fewer devices in UCX_NET_DEVICES"
            )
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
