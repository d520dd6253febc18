"""Hidden states of batches that stopped between two layers, until someone takes them up.

The slots lie in a buffer of the caller's, as the KV cache does, so another process can map
them or have their bytes sent. The rows are in the order of the plan that made them: who
takes them up runs a plan of the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blitzd.engine.arena import TORCH_DTYPES, Buffer
from blitzd.engine.model_config import DTYPE_BYTES, Dtype
from blitzd.sched import NoRoom


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """`slots` places for [rows, hidden] of `dtype` each; `rows` is the most that a step has,
    its `max_batch_tokens`."""

    slots: int
    rows: int
    hidden: int
    dtype: Dtype

    @property
    def slot_bytes(self) -> int:
        return self.rows * self.hidden * DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return self.slots * self.slot_bytes


class HiddenSlots:
    """Slots over `buffer`: at least `geometry.bytes` writable bytes that outlive it.

    A slot is taken by `put`, or by `reserve` for bytes that come from another process, and is
    the taker's until `release`. So the source can keep its copy until the other side has
    said that it has its own.
    """

    def __init__(self, geometry: SlotGeometry, buffer: Buffer) -> None:
        view = memoryview(buffer).cast("B")
        if view.readonly:
            raise ValueError("the buffer of the hidden states is read-only")
        if len(view) < geometry.bytes:
            raise ValueError(f"the buffer has {len(view)} bytes; {geometry.bytes} are needed")
        self.geometry = geometry
        flat = torch.frombuffer(view[: geometry.bytes], dtype=TORCH_DTYPES[geometry.dtype])
        self._slots = flat.view(geometry.slots, geometry.rows, geometry.hidden)
        self._free = list(reversed(range(geometry.slots)))
        self._rows: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def put(self, hidden: torch.Tensor) -> int:
        """Copies [rows, hidden], from any device, into a free slot and returns its number.
        Raises NoRoom, and ValueError for a shape that no slot takes."""
        geometry = self.geometry
        if hidden.dim() != 2 or hidden.shape[1] != geometry.hidden:
            raise ValueError(f"hidden: shape {list(hidden.shape)}; [rows, {geometry.hidden}] fits")
        if hidden.dtype != self._slots.dtype:
            raise ValueError(f"hidden: {hidden.dtype}; the slots hold {self._slots.dtype}")
        slot = self.reserve(hidden.shape[0])
        self.get(slot).copy_(hidden)
        return slot

    def reserve(self, rows: int) -> int:
        """Takes a slot for `rows` rows whose bytes come from elsewhere, into its segment."""
        if not 1 <= rows <= self.geometry.rows:
            raise ValueError(f"rows: {rows}; a slot takes 1 to {self.geometry.rows}")
        if not self._free:
            raise NoRoom(f"all {self.geometry.slots} slots for hidden states are taken")
        slot = self._free.pop()
        self._rows[slot] = rows
        return slot

    def get(self, slot: int) -> torch.Tensor:
        """[rows, hidden], a view of the slot's bytes. Raises KeyError when it is free."""
        return self._slots[slot, : self._rows[slot]]

    def segment(self, slot: int) -> tuple[int, int]:
        """(offset, length) of a taken slot's rows in the buffer, bytes."""
        geometry = self.geometry
        row_bytes = geometry.slot_bytes // geometry.rows
        return slot * geometry.slot_bytes, self._rows[slot] * row_bytes

    def release(self, slot: int) -> None:
        """Raises KeyError when it is free: what was there may belong to another by then."""
        del self._rows[slot]
        self._free.append(slot)
