"""A disk in memory that can lose power: for virtual time and for tests.

Until `fdatasync`, what was written is only seen by this process; a power cut keeps any
part of it, sector by sector. Names wait for `fsync_directory` in order, as they do in a
journal. `capacity_bytes` makes it run full.
"""

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SECTOR_BYTES = 512


@dataclass(slots=True)
class _File:
    data: bytearray = field(default_factory=bytearray)
    """What readers see."""
    durable: bytearray = field(default_factory=bytearray)
    """What a power cut leaves."""
    dirty: set[int] = field(default_factory=set)
    """Sectors of `data` that differ from `durable`."""

    def touch(self, start: int, stop: int) -> None:
        self.dirty.update(range(start // SECTOR_BYTES, (stop - 1) // SECTOR_BYTES + 1))

    def persist(self, sectors: set[int], size: int) -> None:
        for sector in sectors:
            start = sector * SECTOR_BYTES
            piece = self.data[start : start + SECTOR_BYTES]
            if len(self.durable) < start:
                self.durable.extend(bytes(start - len(self.durable)))
            self.durable[start : start + len(piece)] = piece
        del self.durable[size:]
        self.durable.extend(bytes(size - len(self.durable)))


class VirtualDisk:
    """A `Disk`. One thread at a time, as in virtual time."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._names: dict[Path, _File] = {}
        self._durable_names: dict[Path, _File] = {}
        self._pending: list[tuple[Path, Path | None, _File | None]] = []
        """Name operations not yet durable: (target, source that goes, file or removal)."""
        self._open: dict[int, _File] = {}
        self._locks: dict[int, _File] = {}
        self._next_fd = 3

    def power_cut(self, random: Random) -> None:
        """Everything not synced survives in part. All descriptors and locks are gone."""
        for operation in self._pending[: random.randint(0, len(self._pending))]:
            _apply(self._durable_names, operation)
        self._names = dict(self._durable_names)
        for file in self._names.values():
            self._cut(file, random)
        self._pending.clear()
        self.forget_process()

    def forget_process(self) -> None:
        """As after a kill: descriptors and locks are gone, what was written stays."""
        self._open.clear()
        self._locks.clear()

    @staticmethod
    def _cut(file: _File, random: Random) -> None:
        kept = {sector for sector in sorted(file.dirty) if random.random() < 0.5}
        size = len(file.durable)
        if len(file.data) != size:
            size = random.randint(min(size, len(file.data)), max(size, len(file.data)))
        file.persist(kept, size)
        file.data[:] = file.durable
        file.dirty.clear()

    def make_directory(self, path: Path) -> None:
        """Directories need no making here."""

    def names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in self._names if path.parent == directory)

    def open(self, path: Path, *, write: bool = False) -> int:
        file = self._names.get(path)
        if file is None:
            if not write:
                raise _error(errno.ENOENT, path)
            file = _File()
            self._name((path, None, file))
        self._next_fd += 1
        self._open[self._next_fd] = file
        return self._next_fd

    def close(self, fd: int) -> None:
        self._file(fd)
        del self._open[fd]
        self._locks.pop(fd, None)

    def size(self, fd: int) -> int:
        return len(self._file(fd).data)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        return bytes(self._file(fd).data[offset : offset + count])

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        file = self._file(fd)
        room = len(data)
        if self.capacity_bytes is not None:
            used = sum(len(other.data) for other in self._names.values())
            room = min(room, self.capacity_bytes - used + len(file.data) - offset)
            if room <= 0:
                raise _error(errno.ENOSPC)
        stop = offset + room
        file.touch(min(offset, len(file.data)), stop)
        file.data.extend(bytes(max(0, stop - len(file.data))))
        file.data[offset:stop] = data[:room]
        return room

    def truncate(self, fd: int, size: int) -> None:
        file = self._file(fd)
        old = len(file.data)
        del file.data[size:]
        file.data.extend(bytes(size - len(file.data)))
        file.touch(min(size, old), max(size, old) + 1)

    def fdatasync(self, fd: int) -> None:
        file = self._file(fd)
        file.persist(file.dirty, len(file.data))
        file.dirty.clear()

    def fsync_directory(self, path: Path) -> None:
        for operation in self._pending:
            _apply(self._durable_names, operation)
        self._pending.clear()

    def rename(self, source: Path, target: Path) -> None:
        if source not in self._names:
            raise _error(errno.ENOENT, source)
        self._name((target, source, self._names[source]))

    def remove(self, path: Path) -> None:
        if path not in self._names:
            raise _error(errno.ENOENT, path)
        self._name((path, None, None))

    def lock(self, fd: int) -> bool:
        file = self._file(fd)
        if any(other is file for holder, other in self._locks.items() if holder != fd):
            return False
        self._locks[fd] = file
        return True

    def _file(self, fd: int) -> _File:
        if fd not in self._open:
            raise _error(errno.EBADF)
        return self._open[fd]

    def _name(self, operation: tuple[Path, Path | None, _File | None]) -> None:
        _apply(self._names, operation)
        self._pending.append(operation)


def _apply(names: dict[Path, _File], operation: tuple[Path, Path | None, _File | None]) -> None:
    target, source, file = operation
    if source is not None:
        names.pop(source, None)
    if file is None:
        names.pop(target, None)
    else:
        names[target] = file


def _error(code: int, path: Path | None = None) -> OSError:
    return OSError(code, os.strerror(code), str(path) if path else None)
