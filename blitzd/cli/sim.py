"""`blitzd sim`: the virtual world."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import cyclopts
from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from blitzd.cli.sim_zigzag import zigzag
from blitzd.sim import (
    kv as kv_module,
    lab as lab_module,
    placement_report as placement_module,
    zigzag as zigzag_module,
)
from blitzd.sim.candidates import Space
from blitzd.sim.coefficients import load_coefficients
from blitzd.sim.errors import InputError
from blitzd.sim.goodput import Bench, Targets
from blitzd.sim.hardware import Link, find_gpu
from blitzd.sim.kvlab import KvOptions
from blitzd.sim.models import find_model
from blitzd.sim.placement import Search
from blitzd.sim.report import Table, sealed, write_tables
from blitzd.sim.requests import dump_requests, generate_fixture, load_requests
from blitzd.sim.workload import find_workload

app = cyclopts.App(name="sim", help="Try scheduling, placement and KV transfer in virtual time.")

Positive = Annotated[int, Parameter(validator=cyclopts.validators.Number(gte=1))]
PositiveFloat = Annotated[float, Parameter(validator=cyclopts.validators.Number(gt=0))]


@contextmanager
def failures() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        print(f"blitzd sim: {error}", file=sys.stderr)
        raise SystemExit(1) from error


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, for a person only."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def emit(
    report: dict[str, object], tables: list[Table], as_json: bool, csv_dir: Path | None
) -> None:
    if csv_dir is not None:
        write_tables(tables, csv_dir)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for table in tables:
        table.print(Console())
    print(f"report hash {report['report_hash']}")


@app.command(help_epilogue=lab_module.HELP, help_format="plaintext")
def batching(
    *,
    out: Path,
    requests: Path | None = None,
    batch_size: Positive = 16,
    max_num_seqs: Positive = 32,
    target_ttft_ms: Positive = 200,
    seed: int = 0,
    kv_blocks: Positive | None = None,
    preemption: Literal["recompute", "swap"] = "recompute",
    swap_gb_s: PositiveFloat = 25.0,
    kv_bytes_per_token: Positive = 131072,
    shared_prefix: Annotated[int, Parameter(validator=cyclopts.validators.Number(gte=0))] = 0,
    plot: Path | None = None,
    json: bool = False,
    csv: Path | None = None,
) -> None:
    """The scheduler lab: static against continuous batching, and the concurrency to run at.

    Parameters
    ----------
    out
        Directory for static.txt, compare.txt, maxseqs.txt, queue.csv, cost.txt, tune.txt.
    requests
        JSON list of {"prompt_tokens", "output_tokens"}. Without it 100 requests are drawn
        from the seed and kept as requests.json beside the results.
    batch_size
        Slots of both static and continuous batching in compare.txt.
    max_num_seqs
        Slots in maxseqs.txt and queue.csv.
    target_ttft_ms
        What the p99 TTFT of tune.txt must not exceed.
    seed
        For arrivals, and for the requests when none are given.
    kv_blocks
        Also run the list on so many KV blocks of 16 tokens.
    preemption
        What a sequence that lost its KV costs: computing it again, or moving it out and in.
    swap_gb_s
        Rate of the way to host memory, each direction.
    kv_bytes_per_token
        KV of one token, for swapping; 131072 is llama-3.1-8b.
    shared_prefix
        Also run the list with so many tokens in common before every prompt.
    plot
        PNG of slots in use over time.
    json
        Print the whole report as JSON.
    csv
        Directory for every table as CSV.
    """
    bounded = kv_blocks and KvOptions(
        kv_blocks, max_num_seqs, preemption, swap_gb_s, kv_bytes_per_token
    )
    options = lab_module.LabOptions(
        batch_size, max_num_seqs, target_ttft_ms, seed, bounded or None, shared_prefix
    )
    with failures():
        if requests is None:
            request_list = generate_fixture(seed)
            out.mkdir(parents=True, exist_ok=True)
            (out / "requests.json").write_text(dump_requests(request_list), encoding="utf-8")
        else:
            request_list = load_requests(requests)
        with _progress("concurrency") as on_progress:
            lab = lab_module.run_lab(request_list, options, on_progress)
        lab_module.write_lab(lab, out)
    if plot is not None:
        # Only here: loading matplotlib takes longer than most commands.
        from blitzd.sim.plots import plot_slots

        plot_slots(lab.static, lab.continuous, batch_size, plot)
    emit(lab.report, lab.tables, json, csv)


@app.command(help_epilogue=kv_module.HELP, help_format="plaintext")
def kv(
    *,
    model: str | None = None,
    tokens: Positive = 1000,
    gpu: str = "h100",
    tp: Positive | None = None,
    rate: PositiveFloat = 10.0,
    link_gbps: PositiveFloat | None = None,
    json: bool = False,
    csv: Path | None = None,
) -> None:
    """What handing a request's KV over costs. Without a model: the placement document's tables.

    Parameters
    ----------
    model
        A built-in model, or a Hugging Face config.json.
    tokens
        Prompt length.
    gpu
        A built-in GPU, or a JSON file of one.
    tp
        Tensor parallel size of the prefill; the fewest GPUs that hold the model if not given.
    rate
        Requests per second, for the network rate needed.
    link_gbps
        One more link, of so many Gb/s.
    json
        Print the report as JSON.
    csv
        Directory for every table as CSV.
    """
    with failures():
        accelerator = find_gpu(gpu)
        if model is None:
            tables = kv_module.default_tables(accelerator)
            report: dict[str, object] = {table.title: table.as_dicts() for table in tables}
        else:
            shape = find_model(model)
            size = tp or kv_module.smallest_tp(shape, accelerator)
            extra = (
                [] if link_gbps is None else [Link(f"{link_gbps:g}g", link_gbps / 8 * 1e9, 2e-5)]
            )
            account = kv_module.account(shape, accelerator, size, tokens, rate, extra)
            report, tables = account.report, account.tables
        emit(sealed(report), tables, json, csv)


@app.command(help_epilogue=placement_module.HELP, help_format="plaintext")
def placement(
    *,
    model: str,
    gpu: str = "h100",
    rate: PositiveFloat = 100.0,
    ttft: PositiveFloat = 1.0,
    tpot: PositiveFloat = 0.05,
    attainment: Annotated[
        float, Parameter(validator=cyclopts.validators.Number(gt=0, lte=1))
    ] = 0.9,
    algorithm: Literal[1, 2] = 1,
    nodes: Positive | None = None,
    gpus_per_node: Positive = 8,
    coefficients: Path | None = None,
    workload: str | None = None,
    requests: Positive = 3000,
    seed: int = 0,
    plot: Path | None = None,
    json: bool = False,
    csv: Path | None = None,
) -> None:
    """What to buy: DistServe's placement search, with colocated baselines.

    Parameters
    ----------
    model
        A built-in model, or a Hugging Face config.json.
    gpu
        A built-in GPU, or a JSON file of one.
    rate
        Requests per second to serve.
    ttft
        Target for the time to first token, s.
    tpot
        Target for the mean time between a request's later tokens, s.
    attainment
        Share of requests that must meet the targets.
    algorithm
        1: any GPUs are well connected. 2: only those of a node are.
    nodes
        Nodes there are; as many as the rate takes if not given.
    gpus_per_node
        GPUs in a node; tensor and pipeline sizes of an instance stay inside it.
    coefficients
        Measured step times instead of the roofline: a DistServe profile, a splitwise-sim
        perf_model.csv, or a profile of our own.
    workload
        chat, sharegpt, or a trace file whose lengths are drawn.
    requests
        Least number of requests in a simulation run. Few make goodput noisy, and too high
        for instances so fast that the run ends before they are full.
    seed
        For lengths and arrivals.
    plot
        PNG of GPUs against goodput with the Pareto front.
    json
        Print the report as JSON.
    csv
        Directory for every table as CSV.
    """
    with failures(), _progress("placement") as on_progress:
        shape, accelerator = find_model(model), find_gpu(gpu)
        load = find_workload(workload, shape.max_context)
        measured = (
            None
            if coefficients is None
            else load_coefficients(coefficients, shape.name, accelerator.name)
        )
        search = Search(
            Space(shape, accelerator, load, measured),
            Bench(load, Targets(ttft, tpot, attainment), requests, seed),
            rate,
            gpus_per_node,
            nodes,
            on_progress,
        )
        found = search.algorithm_1() if algorithm == 1 else search.algorithm_2()
        described = placement_module.describe(search, found, algorithm)
    if plot is not None:
        from blitzd.sim.plots import plot_pareto

        title = f"{shape.name} on {accelerator.name}"
        plot_pareto(title, described.points, described.chosen, plot)
    emit(sealed(described.report), described.tables, json, csv)


app.command(zigzag, help_epilogue=zigzag_module.HELP, help_format="plaintext")
