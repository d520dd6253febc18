"""A model's weights in memory: one contiguous, read-only range of bytes.

Whoever fills the range (a mapped file, a copy from a peer) is not this module's
business; it gives names to parts of it.
"""

from __future__ import annotations

import mmap
import warnings
from math import prod
from pathlib import Path

import torch

from blitzd.engine.layout import Layout, damaged_sections, read_model_file
from blitzd.engine.model_config import ModelConfig
from blitzd.engine.options import Weights
from blitzd.engine.weights import WeightsCopy, map_weights

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
    def open(cls, directory: Path, how: Weights = "map") -> Arena:
        """The arena of a prepared directory.

        Raises FileNotFoundError, or ValueError when the directory is not what
        `blitzd.engine.prepare` makes.
        """
        file = read_model_file(directory)
        if how == "map":
            return cls(file.config, file.layout, map_weights(directory))
        copy = WeightsCopy(directory, file.layout)
        for section in file.layout.sections:
            copy.fill(section)
        return cls(file.config, file.layout, copy.buffer)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of shape `spec.shape`; KeyError when the model has no such tensor."""
        spec = self._specs[name]
        length = prod(spec.shape) * self.dtype.itemsize
        return self._bytes[spec.offset : spec.offset + length].view(self.dtype).view(spec.shape)

    def verify(self) -> list[str]:
        """Names of the sections whose bytes do not have the recorded digest."""
        return damaged_sections(self.layout, self.buffer)
