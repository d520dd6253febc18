"""One shape for what the simulator says: tables that print, dump and hash."""

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]

    def as_dicts(self) -> list[dict[str, Cell]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def as_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()

    def print(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            numeric = all(not isinstance(row[index], str) for row in self.rows)
            table.add_column(column, justify="right" if numeric else "left")
        for row in self.rows:
            table.add_row(*(_show(cell) for cell in row))
        console.print(table)


def _show(cell: Cell) -> str:
    return f"{cell:,.4g}" if isinstance(cell, float) else str(cell)


@dataclass(frozen=True, slots=True)
class Point:
    """A choice in the plane of GPUs and requests per second."""

    gpus: int
    goodput: float
    label: str
    family: str
    on_front: bool


def report_hash(report: Mapping[str, object]) -> str:
    """SHA-256 of the report as canonical JSON; equal reports hash equal in any process."""
    text = json.dumps(report, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(report: Mapping[str, object]) -> dict[str, object]:
    """The report with its own hash under `report_hash`."""
    return {**report, "report_hash": report_hash(report)}


def write_tables(tables: Sequence[Table], directory: Path) -> None:
    """Each table as `TITLE.csv`, the title in lower case with dashes."""
    directory.mkdir(parents=True, exist_ok=True)
    for table in tables:
        stem = "-".join("".join(c if c.isalnum() else " " for c in table.title.lower()).split())
        (directory / f"{stem}.csv").write_text(table.as_csv(), encoding="utf-8")
