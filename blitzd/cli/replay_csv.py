"""The time series of a log as a CSV file, written as it is made."""

import csv
from collections.abc import Iterable
from pathlib import Path

import msgspec

from blitzd.events.record import Record
from blitzd.fsm import ClusterState
from blitzd.fsm.series import Row, Series


def write_series(file: Path, state: ClusterState, records: Iterable[Record], every_ms: int) -> int:
    """The file appears when it is complete. Returns how many rows it has beside the header;
    raises OSError and what the fold raises."""
    temporary = file.with_name(file.name + ".tmp")
    series = Series(state, every_ms)
    count = 0
    try:
        with temporary.open("w", encoding="utf-8", newline="") as sink:
            lines = csv.writer(sink, lineterminator="\n")
            lines.writerow(Row.__struct_fields__)

            def put(rows: list[Row]) -> None:
                nonlocal count
                lines.writerows(map(msgspec.structs.astuple, rows))
                count += len(rows)

            for record in records:
                put(series.take(record))
            put(series.finish())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return count
