"""The lab's request list: a JSON array of `prompt_tokens` and `output_tokens`."""

import json
import random
from pathlib import Path
from typing import NamedTuple

from blitzd.sim.errors import InputError, TraceError

FIXTURE_SIZE = 100
MAX_TOKENS = 10_000_000
"""Above this a length is a mistake, not a request."""


class Request(NamedTuple):
    prompt_tokens: int
    output_tokens: int


def generate_fixture(seed: int, count: int = FIXTURE_SIZE) -> list[Request]:
    """Chat-shaped lengths: most answers short, one in six long.

    The spread of the outputs is what static batching pays for: the longest of a batch of
    16 is several times the mean.
    """
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        prompt = min(2000, max(16, round(rng.lognormvariate(5.6, 0.8))))
        long_answer = rng.random() < 1 / 6
        output = rng.randint(300, 800) if long_answer else rng.randint(10, 150)
        requests.append(Request(prompt, output))
    return requests


def dump_requests(requests: list[Request]) -> str:
    """The JSON text of a request list, one request a line."""
    lines = (json.dumps(request._asdict()) for request in requests)
    return "[\n" + ",\n".join(lines) + "\n]\n"


def load_requests(path: Path) -> list[Request]:
    """Reads a request list.

    Raises InputError when the file cannot be read or is no list, TraceError (with line and
    field) for an entry that is no request. Keys other than the two are ignored.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    requests = [_parse(path, line, entry) for line, entry in _entries(path, text)]
    if not requests:
        raise TraceError(path, 1, "requests", "the list is empty; at least one is needed")
    return requests


def _entries(path: Path, text: str) -> list[tuple[int, object]]:
    """The array's elements with the line that each starts on."""
    decoder = json.JSONDecoder()
    position = _skip_space(text, 0)
    if text[position : position + 1] != "[":
        raise TraceError(path, _line(text, position), "requests", "expected a JSON array")
    position = _skip_space(text, position + 1)
    entries: list[tuple[int, object]] = []
    while text[position : position + 1] != "]":
        if entries:
            if text[position : position + 1] != ",":
                raise TraceError(path, _line(text, position), "requests", "expected , or ]")
            position = _skip_space(text, position + 1)
        try:
            entry, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            problem = f"not JSON: {error.msg}"
            raise TraceError(path, _line(text, position), "requests", problem) from error
        entries.append((_line(text, position), entry))
        position = _skip_space(text, end)
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        raise TraceError(path, _line(text, rest), "requests", "text after the array")
    return entries


def _parse(path: Path, line: int, entry: object) -> Request:
    if not isinstance(entry, dict):
        raise TraceError(path, line, "requests", f"expected an object, not {entry!r:.40}")
    values = []
    for field in Request._fields:
        if field not in entry:
            known = ", ".join(map(str, entry)) or "nothing"
            raise TraceError(path, line, field, f"is missing; the entry has {known}")
        values.append(check_length(path, line, field, entry[field]))
    return Request(*values)


def check_length(path: Path, line: int, field: str, value: object) -> int:
    """`value` as a token count, or a TraceError that says what would be one."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        problem = f"{value!r:.40} is not a whole number from 1 to {MAX_TOKENS}"
        raise TraceError(path, line, field, problem)
    return value


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
