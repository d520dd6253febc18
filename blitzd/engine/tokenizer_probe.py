"""Whether a tokenizer.json that somebody else wrote can be used in a process that matters.

It may hold regular expressions that backtrack for ever and replacements that make gigabytes of
a letter. So it is tried once, when a model is prepared, in a process with bounded time and
memory. That process runs this file as a script, which imports nothing of ours.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

CPU_S = 10
MEMORY_BYTES = 3 << 30
"""Of address space. The largest real tokenizers take 1 GB to read."""
CHARACTERS = 4000

_LETTERS = ("a", " ", "0", "\n", "!", "_", "a ", "aA1 \n'!", "é", "漢字", "🐙\u200d", "<|", "▁a")


class Probed(NamedTuple):
    adds_bos: bool
    """It puts the beginning-of-sequence token first by itself."""
    largest_id: int
    largest_token: str


def probe(path: Path, bos: int | None) -> Probed:
    """Raises ValueError for a tokenizer that cannot be read, does not end or takes too much."""
    command = [sys.executable, "-P", __file__, str(path), str(-1 if bos is None else bos)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=12 * CPU_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{path}: reading it and {CHARACTERS} characters does not end") from None
    if done.returncode == -signal.SIGXCPU:
        raise ValueError(f"{path}: {CHARACTERS} characters take it more than {CPU_S} s")
    if done.returncode < 0 or "MemoryError" in done.stderr:
        raise ValueError(
            f"{path}: reading it and {CHARACTERS} characters takes more than "
            f"{MEMORY_BYTES >> 30} GiB, or ends the process (status {done.returncode})"
        )
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        raise ValueError(f"{path}: {reason[-1]}")
    return Probed(*json.loads(done.stdout))


def _run(path: str, bos: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, 2 * CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(path)
    backend.no_truncation()
    backend.no_padding()
    adds_bos = backend.encode("a", add_special_tokens=True).ids[:1] == [bos]
    for letters in _LETTERS:
        text = (letters * CHARACTERS)[:CHARACTERS]
        for tail in ("", "!", "\ufffd"):
            ids = backend.encode(text + tail, add_special_tokens=False).ids
        backend.decode(ids)
    token, largest = max(
        backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]
    )
    sys.stdout.write(json.dumps([adds_bos, largest, token]))


if __name__ == "__main__":
    try:
        _run(sys.argv[1], int(sys.argv[2]))
    except Exception as failure:  # the binding raises bare Exception
        sys.exit(f"{type(failure).__name__}: {failure}")
