"""Reading what somebody else wrote: regular files of a bounded size, JSON objects."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_TEXT = 64 << 20
"""Bytes of a JSON file or a template; the largest real ones are tokenizers of 20 MB."""


def check_file(path: Path) -> int:
    """The size of a regular file. Raises ValueError for anything else that has a name: a pipe
    blocks who opens it, a device may never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return found.st_size


def read_bytes(path: Path, limit: int = MAX_TEXT) -> bytes:
    """Raises FileNotFoundError, or ValueError for more than `limit` bytes."""
    check_file(path)
    with path.open("rb") as handle:
        # Read, not asked for: files of some file systems have no size.
        data = handle.read(limit + 1)
    if len(data) > limit:
        size = os.stat(path).st_size
        raise ValueError(f"{path} has {size} bytes; at most {limit} are read")
    return data


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises ValueError, naming the file."""
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value
