"""Where each tensor lies in a model's arena.

The order is canonical: embedding, layers 0..L-1, then the tail (final norm and, unless
it is tied, the head). A section is what becomes ready as a whole, so a watermark over
sections says which layers can run.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec
import xxhash

from blitzd.engine.model_config import DTYPE_BYTES, ModelConfig

ALIGNMENT = 64
"""Bytes; a cache line, and what vector loads like."""

FORMAT = 1
"""Of `model.json` and the arena. A directory of another format is made anew."""


class TensorSpec(msgspec.Struct, frozen=True):
    name: str
    offset: int
    """Bytes from the arena's start."""
    shape: tuple[int, ...]


class Section(msgspec.Struct, frozen=True):
    """A contiguous byte range of the arena: "embed", "layer 7", "tail"."""

    name: str
    offset: int
    length: int
    """Bytes, padding up to the next section included."""
    digest: str = ""
    """xxh3-128 of those bytes, hex."""


class Layout(msgspec.Struct, frozen=True):
    tensors: tuple[TensorSpec, ...]
    sections: tuple[Section, ...]
    length: int
    """Bytes of the whole arena."""

    @property
    def layers(self) -> int:
        return len(self.sections) - 2

    def layer_range(self, layer: int) -> tuple[int, int]:
        """(offset, length) in bytes of one layer."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer} is outside [0, {self.layers})")
        section = self.sections[layer + 1]
        return section.offset, section.length


class ModelFile(msgspec.Struct, frozen=True):
    """The contents of `model.json`."""

    format: int
    config: ModelConfig
    layout: Layout


def _section_shapes(config: ModelConfig) -> list[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    hidden, qkv = config.hidden, config.q_rows + 2 * config.kv_rows
    sections: list[tuple[str, list[tuple[str, tuple[int, ...]]]]] = [
        ("embed", [("embed", (config.vocab, hidden))])
    ]
    for i in range(config.layers):
        prefix = f"layers.{i}."
        tensors: list[tuple[str, tuple[int, ...]]] = [
            (prefix + "attn_norm", (hidden,)),
            (prefix + "qkv", (qkv, hidden)),
        ]
        if config.qkv_bias:
            tensors.append((prefix + "qkv_bias", (qkv,)))
        tensors += [
            (prefix + "o", (hidden, config.q_rows)),
            (prefix + "mlp_norm", (hidden,)),
            (prefix + "gate_up", (2 * config.ffn, hidden)),
            (prefix + "down", (hidden, config.ffn)),
        ]
        sections.append((f"layer {i}", tensors))
    tail: list[tuple[str, tuple[int, ...]]] = [("norm", (hidden,))]
    if not config.tied_head:
        tail.append(("head", (config.vocab, hidden)))
    sections.append(("tail", tail))
    return sections


def part_rows(config: ModelConfig, tensor: str) -> tuple[int, ...]:
    """Rows of each of the published tensors that lie one below the other in the arena's."""
    kind = tensor.rpartition(".")[2]
    q, kv, hidden = config.q_rows, config.kv_rows, config.hidden
    rows = {
        "embed": (config.vocab,),
        "head": (config.vocab,),
        "qkv": (q, kv, kv),
        "qkv_bias": (q, kv, kv),
        "gate_up": (config.ffn, config.ffn),
    }
    return rows.get(kind, (hidden,))


def layout_of(config: ModelConfig) -> Layout:
    """The layout that `config` implies. Matrices are [out, in], so that y = x W^T."""
    element = DTYPE_BYTES[config.dtype]
    tensors: list[TensorSpec] = []
    starts: list[int] = []
    offset = 0
    shapes = _section_shapes(config)
    for _, members in shapes:
        starts.append(offset)
        for name, shape in members:
            tensors.append(TensorSpec(name, offset, shape))
            offset += -(-prod(shape) * element // ALIGNMENT) * ALIGNMENT
    ends = [*starts[1:], offset]
    sections = tuple(
        Section(name, start, end - start)
        for (name, _), start, end in zip(shapes, starts, ends, strict=True)
    )
    return Layout(tuple(tensors), sections, offset)


def seal(config: ModelConfig, layout: Layout, digests: list[str]) -> ModelFile:
    """`model.json` for an arena whose sections have `digests`.

    The model's digest covers shapes and section digests, not the bytes again: who has
    checked each section on arrival has checked the whole.
    """
    sections = tuple(
        Section(s.name, s.offset, s.length, digest)
        for s, digest in zip(layout.sections, digests, strict=True)
    )
    identity = msgspec.structs.replace(config, name="", licence="", digest="")
    digest = xxhash.xxh3_128(msgspec.json.encode((FORMAT, identity, digests))).hexdigest()
    return ModelFile(
        FORMAT,
        msgspec.structs.replace(config, digest=digest),
        Layout(layout.tensors, sections, layout.length),
    )


def check_layout(file: ModelFile) -> None:
    """Raises ValueError when the layout is not the one that the config implies."""
    if file.format != FORMAT:
        raise ValueError(f"format {file.format}; this version reads format {FORMAT}")
    expected = layout_of(file.config)
    bare = tuple(Section(s.name, s.offset, s.length) for s in file.layout.sections)
    if (file.layout.tensors, bare, file.layout.length) != (
        expected.tensors,
        expected.sections,
        expected.length,
    ):
        raise ValueError("the layout in model.json does not follow from its config")


def damaged_sections(layout: Layout, arena: memoryview) -> list[str]:
    """Names of the sections whose bytes do not have the recorded digest."""
    return [
        section.name
        for section in layout.sections
        if xxhash.xxh3_128(arena[section.offset : section.offset + section.length]).hexdigest()
        != section.digest
    ]


def read_model_file(directory: Path) -> ModelFile:
    """`directory`/model.json, checked."""
    path = directory / "model.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=ModelFile)
        check_layout(file)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from error
    return file
