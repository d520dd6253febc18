"""Reads GGUF files: header, metadata, tensor directory, rows of dequantised weights.

A file is untrusted. Every length is checked against what is left of the file before
anything is allocated for it, counts have ceilings, and offsets must lie inside.
Format: docs/gguf.md of the ggml project, versions 2 and 3, little endian.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blitzd.engine.bounded_files import check_file
from blitzd.engine.dequantise import QUANT_TYPES, QuantType, dequantise, type_name

MAX_ENTRIES = 1 << 16
"""Of metadata, and of tensors; real models have tens and thousands."""
MAX_ARRAY = 1 << 21
"""Elements of one metadata array; the largest real ones are vocabularies."""
MAX_VALUES = 1 << 22
"""Strings and array elements in the whole header, so that time and memory are bounded."""
MAX_STRING = 1 << 22
MAX_KEY = 1 << 12
MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip

Value = str | int | float | bool | list[str] | list[int] | list[float] | list[bool]


class GgufError(ValueError):
    """The file is not a GGUF that can be read; the message says where and why."""


class GgufTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    """Rows first, as numpy has it (the file stores the reverse)."""
    type: QuantType
    offset: int
    """Bytes from the file's start."""

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block_elements * self.type.block_bytes


class GgufFile:
    """An open GGUF. `metadata` and `tensors` are complete after construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = check_file(path)
        except ValueError as error:
            raise GgufError(str(error)) from None
        if size < 24:
            raise GgufError(f"{path}: too short for a GGUF header")
        with path.open("rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        try:
            reader = _Reader(self._map)
            self.metadata, self.tensors = _parse(reader)
        except GgufError as error:
            raise GgufError(f"{path}: {error}") from None

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of a tensor as float32 [stop - start, columns]; a vector is
        one row. Raises KeyError for an unknown name."""
        tensor = self.tensors[name]
        rows = prod(tensor.shape[:-1])
        if not 0 <= start <= stop <= rows:
            raise ValueError(f"rows [{start}, {stop}) of {name}, which has {rows}")
        raw = np.frombuffer(
            self._map,
            np.uint8,
            (stop - start) * tensor.row_bytes,
            tensor.offset + start * tensor.row_bytes,
        )
        return dequantise(raw, tensor.type).reshape(stop - start, tensor.shape[-1])


class _Reader:
    """A cursor that never leaves the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.position = 0
        self.values = 0

    def need(self, length: int, what: str) -> int:
        """The position of the next `length` bytes, moving past them."""
        start = self.position
        if length > self.size - start:
            raise GgufError(
                f"{what} at byte {start} needs {length} bytes; the file has {self.size - start}"
            )
        self.position = start + length
        return start

    def spend(self, values: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            raise GgufError(f"more than {MAX_VALUES} strings and array elements in the header")

    def scalar(self, code: str, what: str) -> int | float | bool:
        start = self.need(struct.calcsize(code), what)
        value: int | float | bool = struct.unpack_from(code, self.data, start)[0]
        return value

    def count(self, limit: int, what: str) -> int:
        value = int(self.scalar("<Q", what))
        if value > limit:
            raise GgufError(f"{what} is {value}; at most {limit} is accepted")
        return value

    def string(self, limit: int, what: str) -> str:
        self.spend(1)
        length = self.count(limit, f"length of {what}")
        start = self.need(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise GgufError(f"{what} at byte {start} is not UTF-8") from error

    def strings_array(self, count: int, what: str) -> list[str]:
        """`count` strings. Inlined, because a vocabulary has a hundred thousand."""
        if count * 8 > self.size - self.position:
            raise GgufError(f"{what} claims {count} strings; the file is too short for them")
        data, position, size = self.data, self.position, self.size
        unpack = struct.Struct("<Q").unpack_from
        result: list[str] = []
        for _ in range(count):
            if position + 8 > size:
                raise GgufError(f"{what} ends outside the file")
            length: int = unpack(data, position)[0]
            end = position + 8 + length
            if length > MAX_STRING or end > size:
                raise GgufError(f"{what} has a string of {length} bytes at byte {position}")
            try:
                result.append(data[position + 8 : end].decode())
            except UnicodeDecodeError as error:
                raise GgufError(f"{what} at byte {position} is not UTF-8") from error
            position = end
        self.position = position
        return result

    def value(self, kind: int, what: str) -> Value:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(MAX_STRING, what)
        if kind != _ARRAY:
            raise GgufError(f"{what} has the unknown value type {kind}")
        element = int(self.scalar("<I", what))
        count = self.count(MAX_ARRAY, f"length of {what}")
        self.spend(count)
        if element == _STRING:
            return self.strings_array(count, what)
        if element not in _SCALARS:
            raise GgufError(f"{what} is an array of the unsupported type {element}")
        dtype = np.dtype(np.bool_) if element == 7 else np.dtype(_SCALARS[element])
        start = self.need(count * dtype.itemsize, what)
        values: list[int] = np.frombuffer(self.data, dtype, count, start).tolist()
        return values


def _parse(reader: _Reader) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
    if reader.data[reader.need(4, "magic") : 4] != b"GGUF":
        raise GgufError("not a GGUF file: the first four bytes are not 'GGUF'")
    version = int(reader.scalar("<I", "version"))
    if version not in (2, 3):
        endian = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
        raise GgufError(f"GGUF version {version}{endian}; versions 2 and 3 are read")
    tensor_count = reader.count(MAX_ENTRIES, "the number of tensors")
    entry_count = reader.count(MAX_ENTRIES, "the number of metadata entries")
    metadata: dict[str, Value] = {}
    for index in range(entry_count):
        key = reader.string(MAX_KEY, f"metadata key {index}")
        if key in metadata:
            raise GgufError(f"metadata key {key!r} appears twice")
        metadata[key] = reader.value(int(reader.scalar("<I", key)), f"metadata {key!r}")
    directory = [_tensor_entry(reader, index) for index in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment % 8:
        raise GgufError(f"general.alignment is {alignment!r}; a multiple of 8 is needed")
    base = -(-reader.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in directory:
        if name in tensors:
            raise GgufError(f"tensor {name!r} appears twice")
        tensors[name] = _placed(name, shape, kind, offset, base, alignment, reader.size)
    return metadata, tensors


def _tensor_entry(reader: _Reader, index: int) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string(MAX_KEY, f"name of tensor {index}")
    dimensions = int(reader.scalar("<I", f"dimensions of {name!r}"))
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise GgufError(f"tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are")
    shape = [int(reader.scalar("<Q", f"shape of {name!r}")) for _ in range(dimensions)]
    kind = int(reader.scalar("<I", f"type of {name!r}"))
    offset = int(reader.scalar("<Q", f"offset of {name!r}"))
    return name, tuple(reversed(shape)), kind, offset


def _placed(
    name: str,
    shape: tuple[int, ...],
    kind: int,
    offset: int,
    base: int,
    alignment: int,
    file_size: int,
) -> GgufTensor:
    quant = QUANT_TYPES.get(kind)
    if quant is None:
        known = ", ".join(known.name for known in QUANT_TYPES.values())
        raise GgufError(f"tensor {name!r} is of type {type_name(kind)}; read are {known}")
    if 0 in shape or shape[-1] % quant.block_elements:
        raise GgufError(
            f"tensor {name!r} of shape {shape} is not made of whole {quant.name} blocks "
            f"of {quant.block_elements}"
        )
    length = prod(shape) // quant.block_elements * quant.block_bytes
    if offset % alignment:
        raise GgufError(f"tensor {name!r} is at {offset}, not a multiple of {alignment}")
    if base + offset + length > file_size:
        raise GgufError(
            f"tensor {name!r} of {length} bytes at {base + offset} ends outside the file "
            f"of {file_size} bytes"
        )
    return GgufTensor(name, shape, quant, base + offset)
