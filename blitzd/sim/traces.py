"""Public trace formats, told apart by their first line, refused with line and field.

| format | fields | time |
|---|---|---|
| Azure LLM inference | TIMESTAMP, ContextTokens, GeneratedTokens | date, 7 decimals |
| BurstGPT | Timestamp, Model, Request tokens, Response tokens, ... | s |
| lengths | prompt_tokens, output_tokens | none (all 0) |
| Mooncake | JSONL timestamp, input_length, output_length, hash_ids | ms |
| Bailian | JSONL chat_id, timestamp, input_length, output_length, ... | s |
| LLMServingSim | JSONL input_toks, output_toks, arrival_time | s |
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from blitzd.sim.errors import InputError, TraceError
from blitzd.sim.requests import check_length


class TraceRequest(NamedTuple):
    arrival_ns: int
    """Since the first request."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    time: str | None
    prompt: str
    output: str
    ns_per_unit: float


AZURE = Format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", 1)
CSV_FORMATS = (
    AZURE,
    Format("burstgpt", "Timestamp", "Request tokens", "Response tokens", 1e9),
    Format("lengths", None, "prompt_tokens", "output_tokens", 0),
)
JSONL_FORMATS = (
    Format("bailian", "timestamp", "input_length", "output_length", 1e9),
    Format("mooncake", "timestamp", "input_length", "output_length", 1e6),
    Format("llmservingsim", "arrival_time", "input_toks", "output_toks", 1e9),
)


def load_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace, at most `limit`, in file order.

    Raises InputError when the file cannot be read or its format is none of the known,
    TraceError for a time that goes back, a length below 1, a missing field, no rows.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not text.strip():
        raise TraceError(path, 1, "requests", "the file is empty")
    rows = _json_rows(path, text) if text.lstrip()[0] == "{" else _csv_rows(path, text)
    requests: list[TraceRequest] = []
    start = previous = 0
    for line, form, row in rows:
        at = _time_ns(path, line, form, row)
        if not requests:
            start = previous = at
        if at < previous:
            problem = f"{row[form.time or '']!r} is before the row above; times must ascend"
            raise TraceError(path, line, form.time or "", problem)
        previous = at
        prompt, output = (_length(path, line, f, row) for f in (form.prompt, form.output))
        requests.append(TraceRequest(at - start, prompt, output))
        if len(requests) == limit:
            break
    if not requests:
        raise TraceError(path, 1, "requests", "there is a header but no request")
    return requests


Row = tuple[int, Format, dict[str, object]]


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    reader = csv.DictReader(text.splitlines())
    header = reader.fieldnames or []
    form = next((f for f in CSV_FORMATS if {f.prompt, f.output} <= {*header}), None)
    if form is None or (form.time is not None and form.time not in header):
        raise TraceError(
            path, 1, "header", f"{','.join(header)!r:.80} is no known trace; {_known()}"
        )
    for row in reader:
        yield reader.line_num, form, {key: value for key, value in row.items() if key}


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    form: Format | None = None
    for line, record in enumerate(text.splitlines(), 1):
        if not record.strip():
            continue
        try:
            row = json.loads(record)
        except ValueError as error:
            raise TraceError(path, line, "record", f"not JSON: {error}") from error
        if not isinstance(row, dict):
            raise TraceError(path, line, "record", f"{record!r:.40} is not an object")
        form = form or _json_format(path, line, row)
        yield line, form, row


def _json_format(path: Path, line: int, row: dict[str, object]) -> Format:
    for form in JSONL_FORMATS:
        if form.prompt in row and (form.name != "bailian" or "chat_id" in row):
            return form
    raise TraceError(path, line, "record", f"{', '.join(row)!r:.80} is no known trace; {_known()}")


def _known() -> str:
    return "known are " + "; ".join(
        f"{f.name} ({', '.join(filter(None, (f.time, f.prompt, f.output)))})"
        for f in (*CSV_FORMATS, *JSONL_FORMATS)
    )


def _time_ns(path: Path, line: int, form: Format, row: dict[str, object]) -> int:
    if form.time is None:
        return 0
    value = row.get(form.time)
    try:
        if form is AZURE:
            whole, _, fraction = str(value).partition(".")
            moment = datetime.fromisoformat(whole).replace(tzinfo=UTC)
            return int(moment.timestamp()) * 10**9 + int(fraction[:9].ljust(9, "0"))
        at = round(float(str(value)) * form.ns_per_unit)
    except (ValueError, OverflowError) as error:
        raise TraceError(path, line, form.time, f"{value!r:.40} is not a time") from error
    if at < 0:
        raise TraceError(path, line, form.time, f"{value!r:.40} is negative")
    return at


def _length(path: Path, line: int, field: str, row: dict[str, object]) -> int:
    value = row.get(field)
    if isinstance(value, str):
        value = int(value) if value.strip().lstrip("-").isdecimal() else value
    return check_length(path, line, field, value)
