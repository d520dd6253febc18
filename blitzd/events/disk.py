"""The file operations a log needs, in one injectable place.

`OsDisk` is the operating system. `VirtualDisk` (its own file) is memory that can lose
power. Tests wrap either to fail the k-th operation.
"""

import fcntl
import os
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """Every method raises OSError as the system call of its name does."""

    def make_directory(self, path: Path) -> None:
        """With its parents; an existing one is fine."""

    def names(self, directory: Path) -> list[str]: ...

    def open(self, path: Path, *, write: bool = False) -> int:
        """A descriptor. With `write` the file is created if it is not there."""

    def close(self, fd: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def pread(self, fd: int, count: int, offset: int) -> bytes: ...

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Bytes written, which may be fewer than given."""

    def truncate(self, fd: int, size: int) -> None: ...

    def fdatasync(self, fd: int) -> None: ...

    def fsync_directory(self, path: Path) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def lock(self, fd: int) -> bool:
        """Takes the exclusive lock; False when another holds it. Ends with the descriptor."""


class OsDisk:
    def make_directory(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def names(self, directory: Path) -> list[str]:
        return os.listdir(directory)

    def open(self, path: Path, *, write: bool = False) -> int:
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        return os.open(path, flags | os.O_CLOEXEC, 0o640)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        return os.pread(fd, count, offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        os.remove(path)

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def write_all(disk: Disk, fd: int, data: bytes, offset: int) -> None:
    """Writes all of `data` at `offset`. On OSError a part may have been written."""
    written = disk.pwrite(fd, data, offset)
    while written < len(data):
        written += disk.pwrite(fd, memoryview(data)[written:], offset + written)


def read_all(disk: Disk, fd: int, offset: int = 0) -> bytes:
    """Everything from `offset` to the end of the file."""
    pieces: list[bytes] = []
    while piece := disk.pread(fd, 1 << 20, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def read_file(disk: Disk, path: Path) -> bytes:
    fd = disk.open(path)
    try:
        return read_all(disk, fd)
    finally:
        disk.close(fd)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Puts a complete, synced file at `path` or nothing: temporary file, sync, rename."""
    temporary = path.with_name(path.name + ".tmp")
    fd = disk.open(temporary, write=True)
    try:
        disk.truncate(fd, 0)
        write_all(disk, fd, data, 0)
        disk.fdatasync(fd)
    finally:
        disk.close(fd)
    disk.rename(temporary, path)
    disk.fsync_directory(path.parent)
