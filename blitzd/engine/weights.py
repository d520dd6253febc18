"""The bytes of a prepared model's arena: mapped, or copied. No torch here."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from blitzd.engine.layout import Layout, Section


def map_weights(directory: Path) -> mmap.mmap:
    """`directory`/arena.bin read-only and shared: no second copy in memory."""
    with (directory / "arena.bin").open("rb") as handle:
        return mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)


def drop_cached(directory: Path) -> None:
    """Lets the kernel forget what it keeps of `directory`/arena.bin, so that reading it reads
    the disk. Pages that a process maps stay; without a file there is nothing to do."""
    with contextlib.suppress(FileNotFoundError), (directory / "arena.bin").open("rb") as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def own_memory(size: int) -> mmap.mmap:
    """Private memory for weights. It lies on huge pages where the kernel has them, so computing
    with it misses the TLB less."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class WeightsCopy:
    """Private memory for a copy of `directory`/arena.bin, filled a section at a time."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self.buffer = own_memory(layout.length)
        self._path = directory / "arena.bin"

    def fill(self, section: Section) -> None:
        """Raises ValueError when the file ends before the section does."""
        view = memoryview(self.buffer)[section.offset : section.offset + section.length]
        with self._path.open("rb", buffering=0) as handle:
            handle.seek(section.offset)
            while view:  # one read moves at most 2 GiB
                count = handle.readinto(view)
                if not count:
                    raise ValueError(f"{self._path} ends {len(view)} bytes early")
                view = view[count:]
