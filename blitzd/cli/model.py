"""`blitzd model`: fetch, list and look into models."""

from __future__ import annotations

import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import cyclopts
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blitzd.engine import catalogue
from blitzd.engine.layout import layout_of, read_model_file
from blitzd.engine.prepare import open_source
from blitzd.engine.source_gguf import GgufSource

app = cyclopts.App(name="model", help="Fetch, list and look into models.")


@app.command
def pull(name: str, *, json: bool = False) -> int:
    """Fetch a model of the catalogue, or of the Hugging Face hub, into the user's cache.

    Of a model of the hub only configuration, tokenizer, chat template and safetensors are
    fetched, into the hub's own cache (HF_HOME); a broken download is taken up again.

    Parameters
    ----------
    name
        As `blitzd model list` shows it, or hf:ORG/REPO, or hf:ORG/REPO@REVISION.
    json
        Print one JSON object.
    """
    try:
        path = catalogue.pull(name)
    except (KeyError, ValueError, catalogue.PullError, OSError) as error:
        return _failed(error)
    entry = catalogue.CATALOGUE.get(name)
    if json:
        _print_json({"name": name, "path": str(path), "licence": entry.licence if entry else ""})
    elif entry is None:
        print(path)
    else:
        print(f"{entry.name}: {entry.origin}")
        print(f"licence {entry.licence}, text in {path.with_name('LICENSE')}")
        print(path)
    return 0


@app.command(name="list")
def list_models(*, json: bool = False) -> int:
    """List the catalogue, and what of it is here.

    Parameters
    ----------
    json
        Print a JSON array.
    """
    rows = [
        {
            "name": entry.name,
            "here": catalogue.is_pulled(entry),
            "bytes": entry.bytes,
            "licence": entry.licence,
            "origin": entry.origin,
        }
        for entry in catalogue.CATALOGUE.values()
    ]
    if json:
        _print_json(rows)
        return 0
    table = Table("name", "here", "MB", "licence", "origin")
    for row in rows:
        here = "yes" if row["here"] else "no"
        megabytes = f"{float(str(row['bytes'])) / 1e6:.0f}"
        table.add_row(str(row["name"]), here, megabytes, str(row["licence"]), str(row["origin"]))
    Console().print(table)
    return 0


@app.command
def inspect(model: str, *, json: bool = False) -> int:
    """Show a model's shapes, tensor types and size without loading it.

    Parameters
    ----------
    model
        A name of the catalogue, hf:ORG/REPO, a GGUF file, a directory of safetensors, or a
        prepared one.
    json
        Print one JSON object.
    """
    try:
        found = describe(catalogue.resolve(model))
    except (OSError, ValueError) as error:
        return _failed(error)
    if json:
        _print_json(found)
        return 0
    table = Table(show_header=False)
    for key, value in found.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        # As it is: what a file calls itself is neither markup nor a terminal's commands.
        table.add_row(key, Text("".join(c if c.isprintable() else "\ufffd" for c in text)))
    Console().print(table)
    return 0


def describe(path: Path) -> dict[str, Any]:
    """What `inspect` shows. Raises ValueError when the model is not supported."""
    found: dict[str, Any] = {"path": str(path)}
    if (path / "model.json").exists():
        file = read_model_file(path)
        config = file.config
        found["arena_bytes"] = file.layout.length
        parameters = sum(prod(spec.shape) for spec in file.layout.tensors)
    elif path.is_dir():
        config = open_source(path).config("float32")
        parameters = sum(prod(spec.shape) for spec in layout_of(config).tensors)
    else:
        source = GgufSource(path)
        config = source.config("float32")
        tensors = source.file.tensors.values()
        types = Counter(tensor.type.name for tensor in tensors)
        found["file_bytes"] = path.stat().st_size
        found["tensor_types"] = dict(types)
        parameters = sum(prod(tensor.shape) for tensor in tensors)
    found["parameters"] = parameters
    fields = msgspec.to_builtins(config)
    return found | {key: value for key, value in fields.items() if value not in ("", None)}


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _failed(error: Exception) -> int:
    print(f"error: {error.args[0] if error.args else error}", file=sys.stderr)
    return 1
