"""A region of memory that other processes on this node may map, read-only.

An anonymous file (memfd): it has no name to leak, outlives its creator for as long as
someone maps it, and its seals are enforced by the kernel.
"""

import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from blitzd.fabric.segments import Bytes

SEALS = (
    fcntl.F_SEAL_SHRINK
    | fcntl.F_SEAL_GROW
    # Only maps that exist already may write: whoever gets the descriptor reads.
    | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)
    | fcntl.F_SEAL_SEAL
)


class SharedArena:
    """`size` bytes, zeroed, writable here and read-only for whoever receives `fd`."""

    def __init__(self, size: int, *, name: str = "blitzd-arena", prefault: bool = False) -> None:
        """`prefault` takes the memory now (about 1.5 GB/s), so that first writes are fast
        and a machine without the memory says so here, not by ending a process later.

        Raises ValueError for a size below 1, MemoryError when the memory is not there.
        """
        if size < 1:
            raise ValueError(f"size: {size}; accepted: at least 1 byte")
        self.size = size
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._release = weakref.finalize(self, os.close, self.fd)
        try:
            if prefault:
                _reserve(self.fd, size)
            os.ftruncate(self.fd, size)
            self.mapping = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            self.close()
            raise
        self.bytes: Bytes = np.frombuffer(self.mapping, dtype=np.uint8)
        """The arena as uint8[size], writable."""
        if prefault:
            self.bytes[:: mmap.PAGESIZE] = 0

    @property
    def buffer(self) -> memoryview:
        """The arena for `torch.frombuffer` and the like: format "B", writable."""
        return memoryview(self.mapping)

    def close(self) -> None:
        """Gives the descriptor back, as the end of this object does. The memory goes with its
        last view, here or elsewhere."""
        self._release()
        self.fd = -1


def _reserve(fd: int, size: int) -> None:
    """Takes `size` bytes now. Asked of the kernel alone, a size that does not fit would be
    granted page by page until it ends some process for want of memory."""
    available = available_bytes()
    if size > available:
        raise MemoryError(f"arena of {size} bytes; accepted: at most {available}, what is free")
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise MemoryError(f"arena of {size} bytes: {error.strerror}") from error
        raise


def available_bytes() -> int:
    """What new memory can be had without swapping: `MemAvailable`."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable; accepted: Linux 3.14 or newer")
