"""`blitzd bench`: how fast the parts are, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
import msgspec
from cyclopts import Parameter, validators
from rich.console import Console
from rich.table import Table

from blitzd.engine import catalogue
from blitzd.engine.device import claim_device
from blitzd.engine.options import ReplicaOptions, Weights
from blitzd.engine.prepare import prepare

if TYPE_CHECKING:
    from blitzd.engine.bench import Measured

app = cyclopts.App(name="bench", help="How fast the parts are, on this machine.")

Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]
Numbers = Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())]


@app.command
def engine(
    model: str = catalogue.DEFAULT_MODEL,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str = "cpu",
    threads: Positive = 1,
    weights: Weights = "map",
    batch: Numbers = (1, 4, 16),
    context: Numbers = (128, 512, 1024),
    prompt: Numbers = (64, 128, 256, 512),
    rounds: Positive = 3,
    steps: Positive = 4,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Time prefill and decode steps, and write the profile that `blitzd sim` reads.

    Parameters
    ----------
    model
        A name of the catalogue that was pulled, or a path: as for `blitzd model inspect`.
    dtype
        Of weights and KV.
    device
        cpu, cuda or cuda:N (with FlashInfer), auto.
    threads
        Compute threads.
    weights
        Mapped and shared, or a copy of one's own.
    batch
        Requests decoded together.
    context
        Tokens of each of them; with the batches at least 3 points.
    prompt
        Tokens of a prompt, computed alone in one step; at least 3 sizes, for the fit.
    rounds
        Turns that every point takes.
    steps
        Decode steps of a point in a round.
    out
        Write the step-time profile (JSON, ns) here.
    json
        Print the profile instead of tables.
    """
    try:
        options = ReplicaOptions(device=claim_device(device), weights=weights, threads=threads)
        directory = prepare(catalogue.resolve(model), dtype, catalogue.prepared_dir())
        from blitzd.engine.bench import BenchPlan, measure

        plan = BenchPlan(batch, context, prompt, rounds, steps)
        name = model if model in catalogue.CATALOGUE else ""
        measured = measure(directory, plan, options, name)
        profile = msgspec.json.format(msgspec.json.encode(measured.profile()))
        if out is not None:
            out.write_bytes(profile + b"\n")
    except (KeyError, OSError, ValueError) as error:
        print(f"error: {error.args[0] if error.args else error}", file=sys.stderr)
        return 1
    if json:
        print(profile.decode())
        return 0
    _print_tables(measured)
    if out is not None:
        print(f"step-time profile: {out}")
    return 0


def _print_tables(measured: Measured) -> None:
    console = Console(highlight=False)
    said = measured.conditions
    console.print(
        f"{said['model']}, {said['dtype']}, {said['device']}, threads={said['threads']}, "
        f"weights={said['weights']}; medians (best) of {said['rounds']} rounds of turns"
    )
    for title, points in (("prefill", measured.prefill), ("decode", measured.decode)):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for heading in ("batch", "context", "ms/step", "(best)", "tokens/s"):
            table.add_column(heading, justify="right")
        for point in points:
            size = max(point.batch, 1)
            table.add_row(
                str(size),
                f"{point.tokens / size:.0f}",
                f"{point.ns / 1e6:.2f}",
                f"({point.best_ns / 1e6:.2f})",
                f"{point.tokens_per_s:.1f}",
            )
        console.print(table)
