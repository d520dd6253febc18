"""A prepared model directory, mapped or copied, and checked. No torch here: this is done while
torch is still being imported."""

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import xxhash

from blitzd.engine.errors import Corrupt, InvalidField
from blitzd.engine.layout import Layout, ModelFile, read_model_file
from blitzd.engine.model_config import ModelConfig
from blitzd.engine.options import Weights
from blitzd.engine.tokenizer import Tokenizer
from blitzd.engine.weights import WeightsCopy, map_weights
from blitzd.proto.blitzd.engine import v1 as pb

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Prepared:
    directory: Path
    config: ModelConfig
    layout: Layout
    weights: mmap.mmap
    """The arena's bytes: shared with every process that maps the same file, or our own."""
    tokenizer: Tokenizer


def open_prepared(
    directory: Path, progress: Callable[[pb.LoadProgress], None], how: Weights = "map"
) -> Prepared:
    """Maps or copies the weights and hashes them, calling `progress` as the watermark moves.

    Raises InvalidField (model_path) for a directory that `blitzd.engine.prepare` has not
    made, Corrupt for weights that are not those that it wrote.
    """
    began = time.monotonic()
    file, tokenizer = open_model_file(directory), open_tokenizer(directory)
    try:
        found = (directory / "arena.bin").stat().st_size
    except (OSError, ValueError) as error:
        raise InvalidField(f"model_path: {error}") from error
    if found != file.layout.length:
        raise Corrupt(
            f"model_path: arena.bin has {found} bytes, model.json says {file.layout.length}"
        )
    opened = time.monotonic()
    try:
        weights = _take(directory, file, how, progress)
    except (OSError, ValueError) as error:
        raise Corrupt(f"model_path: {error}") from error
    log.info(
        "weights mapped" if how == "map" else "weights copied",
        model=file.config.name,
        bytes=len(weights),
        open_ms=round((opened - began) * 1e3),
        take_ms=round((time.monotonic() - opened) * 1e3),
    )
    return Prepared(directory, file.config, file.layout, weights, tokenizer)


def open_model_file(directory: Path) -> ModelFile:
    """Raises InvalidField (model_path)."""
    try:
        return read_model_file(directory)
    except (OSError, ValueError) as error:
        raise InvalidField(f"model_path: {error}") from error


def open_tokenizer(directory: Path) -> Tokenizer:
    """Takes half a second of a core with a vocabulary of 50,000. Raises InvalidField
    (model_path)."""
    try:
        return Tokenizer.from_dir(directory)
    except (OSError, ValueError) as error:
        raise InvalidField(f"model_path: {error}") from error


def _take(
    directory: Path, file: ModelFile, how: Weights, progress: Callable[[pb.LoadProgress], None]
) -> mmap.mmap:
    """Section by section, at memory speed; that also brings the pages in. A layer is ready
    when it and all before it are what `model.json` says."""
    copy = WeightsCopy(directory, file.layout) if how == "copy" else None
    weights = copy.buffer if copy is not None else map_weights(directory)
    view = memoryview(weights)
    for index, section in enumerate(file.layout.sections):
        if copy is not None:
            copy.fill(section)
        end = section.offset + section.length
        found = xxhash.xxh3_128(view[section.offset : end]).hexdigest()
        if found != section.digest:
            raise Corrupt(
                f"model_path: {section.name} of {file.config.name} has digest {found}, "
                f"model.json says {section.digest}; remove the directory and prepare it again"
            )
        progress(
            pb.LoadProgress(
                layers_ready=min(index, file.layout.layers),
                layers_total=file.layout.layers,
                bytes_loaded=end,
                bytes_total=len(weights),
                source="map" if copy is None else "disk",
            )
        )
    return weights
