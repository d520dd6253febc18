"""Reads safetensors files: one, or the shards that an index names.

Untrusted like any model file: the header is bounded, every range must lie in the file,
and an index may only name files beside it. Format: the safetensors README.
"""

from __future__ import annotations

import mmap
import re
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from blitzd.engine.bounded_files import check_file, read_bytes

MAX_HEADER = 64 << 20
MAX_TENSORS = 1 << 16
MAX_SHARDS = 1 << 10
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class SafetensorsError(ValueError):
    """The file cannot be read; the message says where and why."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Bytes from the file's start."""
    data: mmap.mmap


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of model.safetensors, or of model.safetensors.index.json's shards."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return _read_file(single)
    if not index.exists():
        raise SafetensorsError(f"{directory} has neither {single.name} nor {index.name}")
    weight_map = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for name in shard_names(index):
        found = _read_file(directory / name)
        if twice := found.keys() & tensors.keys():
            raise SafetensorsError(f"{index}: tensor {min(twice)!r} is in two shards")
        tensors |= found
    missing = weight_map.keys() - tensors.keys()
    if missing:
        raise SafetensorsError(f"{index}: tensor {min(missing)!r} is in none of the shards")
    return tensors


def shard_names(index: Path) -> list[str]:
    """The files that an index names, sorted: each beside it, each a .safetensors."""
    names = sorted(set(_weight_map(index).values()))
    if len(names) > MAX_SHARDS:
        raise SafetensorsError(f"{index} names {len(names)} files; at most {MAX_SHARDS} are read")
    for name in names:
        if not _SHARD.fullmatch(name):
            raise SafetensorsError(
                f"{index} names {name!r}, which is not a .safetensors file beside it"
            )
    return names


def read_rows(tensor: StoredTensor, start: int, stop: int) -> NDArray[Any]:
    """Rows [start, stop), [rows, columns] in the stored type, bfloat16 as float32. A vector
    is one row."""
    columns = tensor.shape[-1]
    dtype = np.dtype(_DTYPES[tensor.dtype])
    at = tensor.offset + start * columns * dtype.itemsize
    values = np.frombuffer(tensor.data, dtype, (stop - start) * columns, at)
    values = values.reshape(stop - start, columns)
    if tensor.dtype != "BF16":
        return values
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(read_bytes(index), type=_Index).weight_map
    except (OSError, ValueError, RecursionError) as error:
        raise SafetensorsError(f"{index}: {error}") from error


def _read_file(path: Path) -> dict[str, StoredTensor]:
    try:
        size = check_file(path)
    except (OSError, ValueError) as error:
        raise SafetensorsError(f"shard cannot be read: {error}") from error
    if size < 8:
        raise SafetensorsError(f"{path}: too short for a header")
    with path.open("rb") as handle:
        data = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER, len(data) - 8):
        raise SafetensorsError(f"{path}: a header of {length} bytes in a file of {len(data)}")
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise SafetensorsError(f"{path}: {len(header)} tensors; at most {MAX_TENSORS} are read")
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SafetensorsError(f"{path}: the header is not what it should be: {error}") from error
    return {
        name: _placed(f"{path}: tensor {name!r}", entry, 8 + length, data)
        for name, entry in entries.items()
    }


def _placed(what: str, entry: _Entry, base: int, data: mmap.mmap) -> StoredTensor:
    if entry.dtype not in _DTYPES:
        raise SafetensorsError(f"{what} is of type {entry.dtype}; read are {', '.join(_DTYPES)}")
    begin, end = entry.data_offsets
    if not entry.shape or min(entry.shape) < 1 or len(entry.shape) > 2:
        raise SafetensorsError(f"{what} has the shape {entry.shape}; vectors and matrices are read")
    size = prod(entry.shape) * np.dtype(_DTYPES[entry.dtype]).itemsize
    if begin < 0 or end - begin != size or base + end > len(data):
        raise SafetensorsError(f"{what} of {size} bytes claims the bytes [{begin}, {end})")
    return StoredTensor(tuple(entry.shape), entry.dtype, base + begin, data)
