"""`blitzd log`: the event log on disk, for people and for scripts."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import blitzd
from blitzd.events import Identity, LogCursor, LogError, LogReader, LogWriter, OsDisk, Record
from blitzd.events.json_form import record_json
from blitzd.events.recovery import Plan, inspect
from blitzd.events.segment import read_header, segment_path, segment_sizes
from blitzd.events.types import StateHashed
from blitzd.events.verify import Report, verify
from blitzd.fsm import ClusterState, IllegalEvent, IllegalTransition, fold

app = cyclopts.App(name="log", help="Look into the event log on disk, check it, repair it.")

PROGRESS_FROM_BYTES = 32 << 20
"""Below this a log is read before a bar would be seen."""

Sequence = Annotated[int | None, Parameter(validator=cyclopts.validators.Number(gte=1))]


@app.command(name="cat")
def cat(
    directory: Path,
    *,
    since: Annotated[Sequence, Parameter(name="--from")] = None,
    until: Sequence = None,
    type: tuple[str, ...] = (),
    follow: bool = False,
    json: bool = False,
) -> int:
    """Print records, one a line.

    Parameters
    ----------
    directory
        A daemon's state directory, or its log/.
    since
        First sequence; the oldest there is by default.
    until
        Last sequence.
    type
        Only records of this type; may be given several times.
    follow
        Wait for more at the end.
    json
        One JSON object a line, in the form that export writes.
    """
    line = _json_line if json else _text_line
    with _failures("cat"):
        reader = _reader(directory)
        batches = reader.follow(since, stop=lambda: False) if follow else reader.batches(since)
        for batch in _until(batches, until):
            wanted = batch
            if type:
                wanted = [r for r in batch if r.payload.__class__.__name__ in type]
            sys.stdout.write("".join(map(line, wanted)))
            sys.stdout.flush()
    return 0


@app.command(name="export")
def export(
    directory: Path,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    since: Annotated[Sequence, Parameter(name="--from")] = None,
    until: Sequence = None,
    json: bool = False,
) -> int:
    """Write the records as JSON lines, in the stable form of docs/log.md.

    Parameters
    ----------
    directory
        A daemon's state directory, or its log/.
    output
        The file to write; it appears when it is complete. Standard output by default.
    since
        First sequence; the oldest there is by default.
    until
        Last sequence.
    json
        With --output: print what was written as a JSON object.
    """
    count = first = last = 0
    temporary = output.with_name(output.name + ".tmp") if output else None
    with _failures("export"), _progress(directory, "exporting") as advance:
        sink = temporary.open("w", encoding="utf-8") if temporary else sys.stdout
        with _reader(directory).cursor(since) as cursor:
            for batch in _until(iter(cursor.read, []), until):
                sink.write("".join(map(_json_line, batch)))
                first, last = first or batch[0].seq, batch[-1].seq
                count += len(batch)
                advance(cursor)
        if temporary and output:
            sink.close()
            temporary.replace(output)
            summary = {"records": count, "first_seq": first, "last_seq": last, "file": str(output)}
            _show(summary, json)
    return 0


@app.command(name="stats")
def stats(directory: Path, *, json: bool = False) -> int:
    """Count what the log holds: by type, by segment, over time.

    Parameters
    ----------
    directory
        A daemon's state directory, or its log/.
    json
        Print one JSON object.
    """
    types: Counter[str] = Counter()
    first: Record | None = None
    last: Record | None = None
    with _failures("stats"), _progress(directory, "counting") as advance:
        reader = _reader(directory)
        with reader.cursor() as cursor:
            while batch := cursor.read():
                types.update(record.payload.__class__.__name__ for record in batch)
                first, last = first or batch[0], batch[-1]
                advance(cursor)
        segments = _segments(reader.directory)
    found = {
        "records": types.total(),
        "first_seq": first.seq if first else 0,
        "last_seq": last.seq if last else 0,
        "first_wall_ns": first.wall_ns if first else None,
        "last_wall_ns": last.wall_ns if last else None,
        "bytes": sum(segment["bytes"] for segment in segments),
        "types": dict(types.most_common()),
        "segments": segments,
    }
    if json:
        _show(found, json)
    else:
        _print_stats(found, first, last)
    return 0


@app.command(name="verify")
def verify_log(directory: Path, *, json: bool = False) -> int:
    """Check every byte, fold every record. Exit code 1 when anything is wrong.

    Parameters
    ----------
    directory
        A daemon's state directory, or its log/.
    json
        Print one JSON object: ok, first_seq, last_seq, hash, problems and more.
    """
    state = ClusterState()
    with _failures("verify"), _progress(directory, "verifying") as advance:
        whole = _reader(directory).first_seq == 1
        report = verify(directory, partial(_apply, state) if whole else None, advance)
        if whole and report.ok:
            report.hash = state.hash()
    if json:
        _show(report, json)
    else:
        _print_report(report)
        if not report.ok:
            _print_remedy(directory)
    return 0 if report.ok else 1


@app.command(name="repair")
def repair(
    directory: Path, *, accept_loss: Sequence = None, dry_run: bool = False, json: bool = False
) -> int:
    """Cut off a torn end, as a daemon's start does; with --accept-loss, damage too.

    Nothing is destroyed: what leaves the log stays beside it, under names that end in
    .torn-TIME.

    Parameters
    ----------
    directory
        A daemon's state directory, or its log/. No daemon may be running on it.
    accept_loss
        The first sequence to give up, as the error message names it.
    dry_run
        Only say what would be done.
    json
        Print one JSON object.
    """
    with _failures("repair"):
        where = _reader(directory).directory
        plan = inspect(OsDisk(), where, accept_loss)
        done = _plan_json(plan)
        needed = plan.cut is not None or plan.set_aside
        if needed and not dry_run:
            identity = Identity(f"{blitzd.__version__} repair")
            writer = LogWriter.open(where, identity, accept_loss=accept_loss)
            done["kept_as"] = list(writer.status().recovered)
            writer.close()
        if json:
            _show(done, json)
        else:
            _print_repair(done, dry_run)
    return 0


def _apply(state: ClusterState, records: list[Record]) -> str | None:
    """Folds; says which record does not fit the state that those before it give."""
    for record in records:
        payload = record.payload
        if isinstance(payload, StateHashed) and payload.state_hash != state.hash():
            return (
                f"record {record.seq} says that the state's hash was {payload.state_hash}, the "
                f"records before it give {state.hash()}"
            )
        try:
            fold(state, record)
        except (IllegalEvent, IllegalTransition) as error:
            return f"record {record.seq} does not fit the state that the log gives: {error}"
    return None


def _reader(directory: Path) -> LogReader:
    reader = LogReader(directory)
    if not segment_sizes(OsDisk(), reader.directory):
        raise LogError(f"{directory}: no log here, nor in log/ below it")
    return reader


def _until(batches: Iterator[list[Record]], until: int | None) -> Iterator[list[Record]]:
    for batch in batches:
        if until is not None and batch[-1].seq >= until:
            kept = [record for record in batch if record.seq <= until]
            if kept:
                yield kept
            return
        yield batch


def _json_line(record: Record) -> str:
    return msgspec.json.encode(record_json(record)).decode() + "\n"


def _text_line(record: Record) -> str:
    shown = record_json(record)
    fields = " ".join(f"{name}={value!r}" for name, value in shown["payload"].items())
    cause = f" <-{record.cause}" if record.cause else ""
    return f"{record.seq:>8} {_time(record.wall_ns)} {shown['type']}{cause} {fields}\n"


def _time(wall_ns: int) -> str:
    try:
        moment = datetime.fromtimestamp(wall_ns // 10**9, UTC)
    except (ValueError, OverflowError):
        return f"{wall_ns}ns"
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{wall_ns // 1000 % 10**6:06d}Z"


@contextmanager
def _failures(command: str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # no failure: see `cli.main`
    except (LogError, OSError) as error:
        print(f"blitzd log {command}: {error}", file=sys.stderr)
        raise SystemExit(1) from error


@contextmanager
def _progress(directory: Path, what: str) -> Iterator[Callable[[LogCursor], None]]:
    """A bar on stderr for a log that takes a while, when a person looks."""
    sizes = segment_sizes(OsDisk(), LogReader(directory).directory)
    total = sum(sizes.values())
    console = Console(stderr=True)
    if total < PROGRESS_FROM_BYTES or not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)

        def advance(cursor: LogCursor) -> None:
            segment, offset = cursor.place
            behind = sum(size for seq, size in sizes.items() if seq < segment)
            progress.update(task, completed=behind + offset)

        yield advance


def _segments(directory: Path) -> list[dict[str, Any]]:
    disk = OsDisk()
    found = []
    for seq, size in segment_sizes(disk, directory).items():
        path = segment_path(directory, seq)
        fd = disk.open(path)
        try:
            header = read_header(disk, fd, path)[0]
        except ValueError as error:
            raise LogError(f"{path}: {error}") from error
        finally:
            disk.close(fd)
        found.append(
            {"file": path.name, "bytes": size, **msgspec.structs.asdict(header)},
        )
    return found


def _plan_json(plan: Plan) -> dict[str, Any]:
    cut = plan.cut
    return {
        "last_seq": plan.last_seq,
        "cut": cut
        and {
            "file": str(cut.file),
            "offset": cut.offset,
            "bytes": cut.size - cut.offset,
            "reason": cut.reason,
        },
        "set_aside": [str(path) for path in plan.set_aside],
        "kept_as": [],
    }


def _show(what: object, json: bool) -> None:
    encoded = msgspec.json.encode(what)
    print((encoded if json else msgspec.json.format(encoded)).decode())


def _print_report(report: Report) -> None:
    print(f"records   {report.first_seq} to {report.last_seq} ({report.records})")
    print(f"segments  {report.segments}, {report.bytes} bytes")
    print(f"snapshots {', '.join(map(str, report.snapshots)) or 'none'}")
    print(f"hash      {report.hash or 'not known: the log does not begin at 1, or is damaged'}")
    if report.torn_bytes:
        print(f"torn end  {report.torn_bytes} bytes; the next start cuts them off")
    for type_id, count in report.unknown.items():
        print(f"unknown   {count} records of type id {type_id}")
    for problem in report.problems:
        place = f"{problem.file}: offset {problem.offset}: " if problem.file else ""
        lost = f"; records from {problem.first_lost} on" if problem.first_lost else ""
        print(f"PROBLEM   {place}{problem.reason}{lost}")
    print("ok" if report.ok else "NOT OK")


def _print_remedy(directory: Path) -> None:
    """What a start would say. It counts by append, so it may give up more than is damaged."""
    try:
        inspect(OsDisk(), _reader(directory).directory)
    except LogError as error:
        print(f"a daemon does not start on it: {error}")


def _print_stats(found: dict[str, Any], first: Record | None, last: Record | None) -> None:
    console = Console()
    types = Table("type", "records", box=None)
    for name, count in found["types"].items():
        types.add_row(name, str(count))
    segments = Table("segment", "bytes", "boot", "version", "node", box=None)
    for segment in found["segments"]:
        columns = ("file", "bytes", "boot_epoch", "daemon_version", "node_id")
        segments.add_row(*(str(segment[column]) for column in columns))
    console.print(types)
    console.print(segments)
    if first and last:
        between = f"{_time(first.wall_ns)} to {_time(last.wall_ns)}"
        print(f"{found['records']} records, {first.seq} to {last.seq}, {between}")


def _print_repair(done: dict[str, Any], dry_run: bool) -> None:
    will = "would be" if dry_run else "was"
    if not done["cut"] and not done["set_aside"]:
        print(f"nothing to repair: the log is whole up to record {done['last_seq']}")
        return
    if cut := done["cut"]:
        print(
            f"{cut['file']} {will} cut at {cut['offset']} ({cut['bytes']} bytes): {cut['reason']}"
        )
    for path in done["set_aside"]:
        print(f"{path} {will} set aside")
    for name in done["kept_as"]:
        print(f"kept as {name}")
    print(f"the log goes on after record {done['last_seq']}")
