"""A model's weights in memory: one contiguous, read-only range of bytes.

Whoever fills the range (a mapped file, a copy from a peer) is not this module's
business; it gives names to parts of it.
"""

from __future__ import annotations

import mmap
import warnings
from io import BufferedReader
from math import prod
from pathlib import Path

import torch

from blitzd.engine.layout import Layout, damaged_sections, read_model_file
from blitzd.engine.model_config import ModelConfig

Buffer = bytes | bytearray | memoryview | mmap.mmap

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Arena:
    """Names over `buffer`, which holds `layout.length` bytes and outlives this object.

    With a `device`, the bytes are copied there, once and as they lie.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        buffer: Buffer,
        device: torch.device | None = None,
    ) -> None:
        view = memoryview(buffer).cast("B")
        if len(view) != layout.length:
            raise ValueError(
                f"the arena of {config.name} has {len(view)} bytes; its layout says {layout.length}"
            )
        self.config = config
        self.layout = layout
        self.buffer = view
        self.dtype = TORCH_DTYPES[config.dtype]
        self._specs = {spec.name: spec for spec in layout.tensors}
        with warnings.catch_warnings():
            # Read-only on purpose: a stray write must fault, not reach the other replicas.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes = torch.frombuffer(view, dtype=torch.uint8)
        if device is not None:
            self._bytes = self._bytes.to(device)

    @classmethod
    def open(cls, directory: Path) -> Arena:
        """Maps `directory`/arena.bin read-only and shared: no second copy in memory.

        Raises FileNotFoundError, or ValueError when the directory is not what
        `blitzd.engine.prepare` makes.
        """
        file = read_model_file(directory)
        with (directory / "arena.bin").open("rb") as handle:
            mapping = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        return cls(file.config, file.layout, mapping)

    @classmethod
    def copy(cls, directory: Path) -> Arena:
        """Reads `directory`/arena.bin into memory of this process: on huge pages where the
        kernel has them, so faster to compute with than a mapped file, and not shared."""
        file = read_model_file(directory)
        buffer = mmap.mmap(-1, file.layout.length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        with (directory / "arena.bin").open("rb") as handle:
            _read_all(handle, memoryview(buffer))
        return cls(file.config, file.layout, buffer)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of shape `spec.shape`; KeyError when the model has no such tensor."""
        spec = self._specs[name]
        length = prod(spec.shape) * self.dtype.itemsize
        return self._bytes[spec.offset : spec.offset + length].view(self.dtype).view(spec.shape)

    def verify(self) -> list[str]:
        """Names of the sections whose bytes do not have the recorded digest."""
        return damaged_sections(self.layout, self.buffer)


def _read_all(handle: BufferedReader, view: memoryview) -> None:
    """One read moves at most 2 GiB."""
    while view:
        count = handle.readinto(view)
        if not count:
            raise ValueError(f"{handle.name} is {len(view)} bytes shorter than its layout says")
        view = view[count:]
