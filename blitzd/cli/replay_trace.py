"""A trace file, written as it is made: its size does not matter to memory."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from blitzd.events.record import Record
from blitzd.fsm.trace import TraceEvent, Tracer
from blitzd.fsm.watched import WatchedState


def write_trace(file: Path, state: WatchedState, records: Iterable[Record]) -> int:
    """The file appears when it is complete. Returns how many trace events it has; raises
    OSError and what the fold raises."""
    temporary = file.with_name(file.name + ".tmp")
    tracer = Tracer(state)
    count = 0
    encode = msgspec.json.Encoder().encode
    try:
        with temporary.open("wb") as sink:
            sink.write(b'{"displayTimeUnit":"ms","traceEvents":[')

            def put(events: Iterable[TraceEvent]) -> None:
                nonlocal count
                for event in events:
                    sink.write(b",\n" if count else b"\n")
                    sink.write(encode(event))
                    count += 1

            for record in records:
                put(tracer.take(record))
            put(tracer.finish())
            sink.write(b"\n]}\n")
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return count
