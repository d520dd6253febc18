"""The batching lab: eight questions, six files, one request list."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from blitzd.sim import batching, kvlab
from blitzd.sim.arrivals import poisson_arrivals
from blitzd.sim.kvlab import KvOptions, run_kv_limited, run_shared_prefix
from blitzd.sim.report import Table, sealed
from blitzd.sim.requests import Request
from blitzd.sim.stats import percentile

Values = dict[str, int | float | str]

ARRIVAL_RATES = (5, 10, 20, 40)
"""Requests per second."""
QUEUE_ARRIVALS = 2000
"""The list is replayed in order until so many have arrived: the p99 of 100 requests is one
request's luck."""

HELP = f"""\
slot: a place in the running batch; one sequence holds it from admission to its last token.
step: one decode iteration, 8 ms whatever the batch; it makes one token for each slot in use.
wait: from arrival to the start of the iteration that gives a slot, in ms.
TTFT: from submission to the end of the decode step that makes the first token, in ms.
throughput: output tokens per second. static and compare count decode steps alone; queue
  and tune run the full cost, in which prompts (0.05 ms a token) hold up the batch.
slot_util: tokens made / (slots x steps); idle places of a short last batch count.
p99: nearest rank, an observed value. No mean is used as a verdict.
queue.csv: Poisson arrivals, the list replayed to {QUEUE_ARRIVALS} requests, the same pattern
  at each rate; avg_queue is a mean over time. tune: every concurrency from 1 is run.
{kvlab.HELP}"""


@dataclass(frozen=True, slots=True)
class LabOptions:
    batch_size: int = 16
    max_num_seqs: int = 32
    target_ttft_ms: int = 200
    seed: int = 0
    kv: KvOptions | None = None
    shared_prefix: int = 0


@dataclass(frozen=True, slots=True)
class Lab:
    """Every result of the lab; `files` are the six documents, and those of options, by name."""

    static: batching.StepCount
    continuous: batching.StepCount
    files: dict[str, str]
    report: dict[str, object]
    tables: list[Table]


def run_lab(
    requests: Sequence[Request],
    options: LabOptions,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Lab:
    """Runs all eight steps on one request list. Pure: the same arguments, the same result."""
    static = batching.run_static(requests, options.batch_size)
    continuous = batching.run_continuous(requests, options.batch_size)
    tune = batching.search_concurrency(requests, options.target_ttft_ms * 1_000_000, on_progress)
    queue = _queue_table(requests, options)
    values = _step_values(requests, options, static, continuous)
    values["tune"] = {
        "target_ttft_ms": options.target_ttft_ms,
        "max_concurrency": tune.clients,
        "throughput_at_target": round(tune.throughput_tps, 3),
    }
    if options.kv is not None:
        values["kv"] = run_kv_limited(requests, options.kv)
    if options.shared_prefix:
        values["prefix"] = run_shared_prefix(
            requests, options.shared_prefix, options.max_num_seqs, options.seed
        )
    files = {f"{name}.txt": _key_values(pairs) for name, pairs in values.items()}
    summary = Table(
        "Batching lab",
        ("file", "result"),
        [(name, " ".join(text.split())) for name, text in files.items()],
    )
    files["queue.csv"] = queue.as_csv()
    scan = [
        {"clients": clients, "p99_ttft_ms": ns / 1e6}
        for clients, ns in enumerate(tune.p99_ttft_ns, 1)
    ]
    report: dict[str, object] = {
        "requests": len(requests),
        "seed": options.seed,
        **values,
        "queue": queue.as_dicts(),
        "tune_scan": scan,
    }
    return Lab(static, continuous, files, sealed(report), [summary, queue])


def _step_values(
    requests: Sequence[Request],
    options: LabOptions,
    static: batching.StepCount,
    continuous: batching.StepCount,
) -> dict[str, Values]:
    """The files that follow from counting steps and tokens alone."""
    capped = batching.run_continuous(requests, options.max_num_seqs)
    static_tps, continuous_tps = (
        round(static.throughput_tps, 3),
        round(continuous.throughput_tps, 3),
    )
    return {
        "static": {
            "total_steps": static.total_steps,
            "throughput_tps": static_tps,
            "slot_util": round(static.slot_util(options.batch_size), 4),
        },
        "compare": {
            "static_tps": static_tps,
            "continuous_tps": continuous_tps,
            "speedup": round(continuous.throughput_tps / static.throughput_tps, 4),
        },
        "maxseqs": {"max_num_seqs": options.max_num_seqs, "peak_running": capped.peak_running},
        "cost": cost_split(requests),
    }


def cost_split(requests: Sequence[Request]) -> Values:
    """Total prefill and decode time of the list, each request by itself, and decode's share."""
    prefill = sum(r.prompt_tokens for r in requests) * batching.PREFILL_NS_PER_TOKEN
    decode = sum(r.output_tokens for r in requests) * batching.DECODE_STEP_NS
    return {
        "total_prefill_ms": round(prefill / 1e6, 3),
        "total_decode_ms": round(decode / 1e6, 3),
        "decode_share": round(decode / (prefill + decode), 4),
    }


def _queue_table(requests: Sequence[Request], options: LabOptions) -> Table:
    count = max(QUEUE_ARRIVALS, len(requests))
    replayed = list(islice(cycle(requests), count))
    rows = []
    for rate in ARRIVAL_RATES:
        arrivals = poisson_arrivals(count, rate, options.seed)
        run = batching.run_open_loop(replayed, arrivals, options.max_num_seqs)
        rows.append((rate, round(run.avg_queue, 4), round(percentile(run.wait_ns, 99) / 1e6, 3)))
    return Table("Queue", ("rps", "avg_queue", "p99_wait_ms"), rows)


def _key_values(pairs: Values) -> str:
    return " ".join(f"{key}={value}" for key, value in pairs.items()) + "\n"


def write_lab(lab: Lab, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in lab.files.items():
        (directory / name).write_text(text, encoding="utf-8")
