"""A prepared model directory, mapped and checked. No torch here: this is done while torch is
still being imported."""

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
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Prepared:
    directory: Path
    config: ModelConfig
    layout: Layout
    weights: mmap.mmap
    """The arena's bytes, shared with every process that maps the same file."""
    tokenizer: Tokenizer


def open_prepared(directory: Path, progress: Callable[[pb.LoadProgress], None]) -> Prepared:
    """Maps the weights and hashes them, calling `progress` as the watermark moves.

    Raises InvalidField (model_path) for a directory that `blitzd.engine.prepare` has not
    made, Corrupt for weights that are not those that it wrote.
    """
    began = time.monotonic()
    try:
        file = read_model_file(directory)
        with (directory / "arena.bin").open("rb") as handle:
            weights = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        tokenizer = Tokenizer.from_dir(directory)
    except (OSError, ValueError) as error:
        raise InvalidField(f"model_path: {error}") from error
    if len(weights) != file.layout.length:
        raise Corrupt(
            f"model_path: arena.bin has {len(weights)} bytes, model.json says {file.layout.length}"
        )
    mapped = time.monotonic()
    _verify(file, weights, progress)
    log.info(
        "weights mapped",
        model=file.config.name,
        bytes=len(weights),
        open_ms=round((mapped - began) * 1e3),
        verify_ms=round((time.monotonic() - mapped) * 1e3),
    )
    return Prepared(directory, file.config, file.layout, weights, tokenizer)


def _verify(
    file: ModelFile, weights: mmap.mmap, progress: Callable[[pb.LoadProgress], None]
) -> None:
    """Section by section, at memory speed; that also brings the pages in. A layer is ready
    when it and all before it are what `model.json` says."""
    layers = file.layout.layers
    view = memoryview(weights)
    for index, section in enumerate(file.layout.sections):
        end = section.offset + section.length
        found = xxhash.xxh3_128(view[section.offset : end]).hexdigest()
        if found != section.digest:
            raise Corrupt(
                f"model_path: {section.name} of {file.config.name} has digest {found}, "
                f"model.json says {section.digest}; remove the directory and prepare it again"
            )
        progress(
            pb.LoadProgress(
                layers_ready=min(index, layers),
                layers_total=layers,
                bytes_loaded=end,
                bytes_total=len(weights),
                source="map",
            )
        )
