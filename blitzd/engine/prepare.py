"""Turns a model as it is published into a directory that an engine can map.

A prepared directory has `arena.bin` (see `layout`), `model.json`, `tokenizer.json` and,
if the model has one, `chat_template.jinja`. It is made once, under a lock and in a
temporary place, and appears under its name complete or not at all. No torch here: the
daemon calls this.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from blitzd.engine.hub import name_of
from blitzd.engine.layout import (
    FORMAT,
    Layout,
    TensorSpec,
    damaged_sections,
    layout_of,
    read_model_file,
    seal,
)
from blitzd.engine.model_config import DTYPE_BYTES, Dtype, ModelConfig, check_config

CHUNK_BYTES = 2 << 20
"""Of float32 that one thread converts at a time: fits a core's cache."""

LOCK_TIMEOUT_S = 600.0

_LARGEST: dict[Dtype, float] = {
    "float64": np.finfo(np.float64).max,
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
}


class Part(NamedTuple):
    """Rows of an arena tensor that come from one source tensor."""

    source: str
    rows: int
    half_rotated_heads: int = 0
    """Non-zero when the source stores this many heads with the pairs (i, i + head_dim / 2);
    their rows are then put in interleaved order."""


class WeightSource(Protocol):
    """A published model, opened and understood."""

    def config(self, dtype: Dtype) -> ModelConfig: ...

    def parts(self, tensor: str) -> list[Part]:
        """What to put, one below the other, into the arena tensor of that name."""

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows [start, stop) of a source tensor, float [rows, columns]."""

    def write_tokenizer(self, directory: Path) -> None: ...


def prepare(source: Path, dtype: Dtype, cache_dir: Path) -> Path:
    """The prepared directory of `source` (a GGUF file, a directory of safetensors, or an
    already prepared one) with weights of `dtype`, made in `cache_dir` unless it is there.

    Raises FileNotFoundError, ValueError (what is not supported, by name) and TimeoutError
    (another process has held the lock for `LOCK_TIMEOUT_S`).
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r}; one of {', '.join(DTYPE_BYTES)} is accepted")
    source = source.resolve()
    if (source / "model.json").exists():
        found = read_model_file(source).config.dtype
        if found != dtype:
            raise ValueError(f"{source} is prepared as {found}; {dtype} was asked for")
        return source
    name = name_of(source) if source.is_dir() else source.stem
    target = cache_dir / f"{name}-{dtype}-{_fingerprint(source)}"
    if _usable(target):
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{target.name}.lock"):
        if not _usable(target):
            build(open_source(source), dtype, target)
    return target


def open_source(path: Path) -> WeightSource:
    """A GGUF file, or a directory with config.json and safetensors."""
    # Here, because the sources are written against this module's contract.
    from blitzd.engine.source_gguf import GgufSource
    from blitzd.engine.source_hf import HfSource

    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    if not path.is_dir():
        return GgufSource(path)
    if (path / "config.json").exists():
        return HfSource(path, name_of(path))
    raise ValueError(
        f"{path} is no model: a GGUF file, a directory with config.json and safetensors, "
        "or a prepared directory is needed"
    )


def build(source: WeightSource, dtype: Dtype, target: Path) -> None:
    """Writes the prepared directory `target`, replacing a broken one."""
    config = source.config(dtype)
    check_config(config)
    layout = layout_of(config)
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        digests = _write_arena(source, config, layout, work / "arena.bin")
        source.write_tokenizer(work)
        (work / "model.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(seal(config, layout, digests)))
        )
        _checked_mark(work).touch()
        work.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fingerprint(source: Path) -> str:
    """Changes whenever a file of the model does; reads no weights."""
    files = sorted(source.glob("*")) if source.is_dir() else [source]
    identity = [
        (str(path), stat.st_size, stat.st_mtime_ns)
        for path in files
        if path.exists() and (stat := path.stat())  # an editor's lock is a link to nothing
    ]
    return hashlib.sha256(repr((FORMAT, identity)).encode()).hexdigest()[:12]


def _usable(directory: Path) -> bool:
    """Complete, and either written since the machine started or checked once since then:
    the arena is not synced when it is written, so a crash of the machine may have left
    its size and not its bytes."""
    try:
        layout = read_model_file(directory).layout
        path = directory / "arena.bin"
        if path.stat().st_size != layout.length:
            return False
        if _checked_mark(directory).exists():
            return True
        with path.open("rb") as handle:
            mapping = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        if damaged_sections(layout, memoryview(mapping)):
            return False
        _checked_mark(directory).touch()
    except (OSError, ValueError):
        return False
    return True


def _checked_mark(directory: Path) -> Path:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return directory / f".checked-{boot}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock that ends with the process."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} has been locked for too long") from None
                time.sleep(0.05)
        yield


def _write_arena(
    source: WeightSource, config: ModelConfig, layout: Layout, path: Path
) -> list[str]:
    """Fills the file section by section; returns their digests."""
    specs: dict[str, list[TensorSpec]] = {section.name: [] for section in layout.sections}
    for spec in layout.tensors:
        owner = next(s for s in layout.sections if s.offset <= spec.offset < s.offset + s.length)
        specs[owner.name].append(spec)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(descriptor, layout.length)

        def write_section(index: int) -> str:
            section = layout.sections[index]
            digest = xxhash.xxh3_128()
            position = section.offset
            for spec in specs[section.name]:
                for data in _tensor_bytes(source, config, spec):
                    digest.update(data)
                    position += _write_all(descriptor, data, position)
                padding = bytes(-position % 64)
                digest.update(padding)
                position += len(padding)
            return digest.hexdigest()

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            return list(pool.map(write_section, range(len(layout.sections))))
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview, position: int) -> int:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], position + written)
    return written


def _tensor_bytes(
    source: WeightSource, config: ModelConfig, spec: TensorSpec
) -> Iterator[memoryview]:
    """The tensor's bytes in order, in pieces; bytes of one piece die with the next."""
    columns = spec.shape[1] if len(spec.shape) > 1 else 1
    for part in source.parts(spec.name):
        step = part.rows if part.half_rotated_heads else max(1, CHUNK_BYTES // (4 * columns))
        for start in range(0, part.rows, step):
            rows = source.read_rows(part.source, start, min(start + step, part.rows))
            if part.half_rotated_heads:
                # A bias is a vector, which comes as one row; its elements are the rows.
                rows = interleave(rows.reshape(-1, columns), part.half_rotated_heads)
            _check_range(part.source, rows, config.dtype)
            yield to_dtype(rows, config.dtype).reshape(-1).view(np.uint8).data


def _check_range(name: str, values: NDArray[Any], dtype: Dtype) -> None:
    """Raises ValueError for weights that are no numbers, or none in `dtype`."""
    limit = _LARGEST[dtype]
    # NaN fails both: numpy's extremes carry it along.
    low, high = float(values.min()), float(values.max())
    if not (-limit <= low and high <= limit):
        worst = high if not high <= limit else low
        raise ValueError(f"tensor {name!r} has the weight {worst}; {dtype} ends at {limit:.8g}")


def interleave(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of half-rotated heads (pairs i, i + d/2) in interleaved order (2i, 2i + 1)."""
    shape = rows.shape
    return rows.reshape(heads, 2, -1, shape[-1]).swapaxes(1, 2).reshape(shape)


def to_dtype(values: NDArray[Any], dtype: Dtype) -> NDArray[Any]:
    """`values` as contiguous bytes of `dtype`; bfloat16, which numpy lacks, as uint16,
    rounded to nearest even. `values` are in range, so NaN payloads are not looked after."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, np.dtype(dtype))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
    return (rounded >> np.uint32(16)).astype(np.uint16)
