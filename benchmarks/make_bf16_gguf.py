"""The embedded model's GGUF with every matrix in bfloat16, for engines that read GGUF only.

    .venv/bin/python benchmarks/make_bf16_gguf.py OUT.gguf

Matrices are dequantised and rounded to nearest even, as ours are for `--dtype bfloat16`, so
both engines compute with the same weights. Norms stay float32; metadata is copied.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import Keys
from gguf.quants import dequantize, quantize

from blitzd.engine.catalogue import DEFAULT_MODEL, pull

BF16, F32 = GGMLQuantizationType.BF16, GGMLQuantizationType.F32
GUESSED_BF16 = 32
"""LlamaFileType of a file that is mostly bfloat16."""


def convert(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == Keys.General.ARCHITECTURE:
            continue
        value = GUESSED_BF16 if name == Keys.General.FILE_TYPE else field.contents()
        kind = field.types[0]
        inner = field.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = F32 if values.ndim == 1 else BF16
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    convert(pull(DEFAULT_MODEL), out)
    print(f"{out}: {out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
