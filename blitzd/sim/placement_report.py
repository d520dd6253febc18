"""A placement as tables and JSON, with the reason that every other choice lost."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from blitzd.sim.placement import Colocated, Deployment, Phase, Placement, Search
from blitzd.sim.report import Point, Table

TABLE_ROWS = 20

HELP = """\
goodput: the highest Poisson rate at which the given share of requests meets its targets;
  prefill alone is held to TTFT, decode alone to TPOT, deployments to both. TPOT runs from
  the first token to the last, KV hand-over included. The first fifth of a run is not judged.
Prefill batches take up to 4096 prompt tokens; chunked baselines pass 512 or 1024 tokens.
Workloads: chat is log-normal, 1000 prompt and 250 output tokens in the mean, sigma 1;
  sharegpt is 300 measured pairs. chat is the default where the model's context holds it.
Where this differs from the two documents behind it:
  * colocated[] has as many GPUs as the deployment, pooled behind one dispatcher, and an own
    chunk size; both lift the baselines. For the lecture's question (llama-3.1-70b on h100)
    disaggregation is then 2 % ahead of the best of them, chunked-512 on TP4, 10 % of
    chunked-1024 and 20 to 30 % of prefill-first. Against the lecture's own baseline, one TP4
    or TP8 instance (lecture_setting[]), it is 14 to 42 % ahead.
  * DistServe's published 1.56 per GPU for OPT-13B on 4 GPUs is one run of 300 requests;
    twelve such runs here give 1.88 with a standard deviation of 0.26. Long runs: 1.7 to 1.9.
    Its simulator also hands KV over in no time and lets decode have KV without end. Here both
    sides run on the same coefficients, so a colocated TP2 comes out ahead of those 3 GPUs;
    the paper's vLLM baseline has the slower coefficients of vLLM as it was.
  * A pipeline's batches in flight do not wait for each other here, which favours pipelines.
"""


@dataclass(frozen=True, slots=True)
class PlacementReport:
    report: dict[str, object]
    tables: list[Table]
    points: list[Point]
    """Every choice, for the plot."""
    chosen: str
    """The label of the deployment's point."""


def describe(search: Search, placement: Placement, algorithm: int) -> PlacementReport:
    best = placement.deployment
    configurations = _configurations(search, placement)
    colocated = _colocated_table("Colocated on as many GPUs", placement.colocated)
    lecture = _colocated_table("Colocated, one instance", placement.lecture)
    points = _points(placement)
    shown = sorted(points, key=lambda p: (not p.on_front, -p.goodput / p.gpus))[:TABLE_ROWS]
    pareto = Table(
        "Best deployments",
        ("deployment", "gpus", "requests_per_s", "per_gpu", "pareto"),
        [
            (p.label, p.gpus, p.goodput, p.goodput / p.gpus, "yes" if p.on_front else "")
            for p in shown
        ],
    )
    summary = _summary(search, placement)
    coefficients = search.space.coefficients
    report: dict[str, object] = {
        "model": search.space.model.name,
        "gpu": search.space.gpu.name,
        "algorithm": algorithm,
        "workload": search.space.workload.name,
        "requests": search.bench.requests,
        "seed": search.bench.seed,
        "ttft_s": search.bench.targets.ttft_s,
        "tpot_s": search.bench.targets.tpot_s,
        "attainment": search.bench.targets.attainment,
        "step_times": "roofline" if coefficients is None else coefficients.source,
        "fit_error": 0.0 if coefficients is None else coefficients.fit_error,
        "rate": search.rate,
        "rate_met": placement.checked_goodput >= search.rate,
        "prefill": _phase_json(best.prefill),
        "decode": _phase_json(best.decode),
        "instances": {"prefill": best.prefill_count, "decode": best.decode_count},
        "segments": placement.segments,
        "gpus": best.gpus,
        "checked_goodput": placement.checked_goodput,
        "checked_goodput_per_gpu": placement.checked_goodput / best.gpus,
        "fewest_gpus": _fewest_json(placement.fewest_gpus(search.rate)),
        "colocated": colocated.as_dicts(),
        "lecture_setting": lecture.as_dicts(),
        "configurations": configurations.as_dicts(),
        "deployments": pareto.as_dicts(),
    }
    tables = [summary, configurations, colocated]
    tables += [lecture] if lecture.rows else []
    return PlacementReport(report, [*tables, pareto], points, best.name)


def _phase_json(phase: Phase) -> dict[str, object]:
    return {
        "tp": phase.replica.tp,
        "pp": phase.replica.pp,
        "goodput": phase.goodput,
        "goodput_per_gpu": phase.per_gpu,
    }


def _fewest_json(deployment: Deployment | None) -> dict[str, object] | None:
    if deployment is None:
        return None
    return {
        "name": deployment.name,
        "gpus": deployment.gpus,
        "estimated_goodput": deployment.estimate,
    }


def _summary(search: Search, placement: Placement) -> Table:
    best = placement.deployment
    rows = [
        (f"prefill: {best.prefill_count} x {best.prefill.name}", best.prefill.per_gpu),
        (f"decode: {best.decode_count} x {best.decode.name}", best.decode.per_gpu),
        (
            f"whole, {best.gpus} GPUs: {placement.checked_goodput:.4g} requests/s checked, "
            f"{search.rate:g} wanted",
            placement.checked_goodput / best.gpus,
        ),
    ]
    fewest = placement.fewest_gpus(search.rate)
    if fewest is not None and fewest.gpus < best.gpus:
        name = f"fewest GPUs, phase by phase: {fewest.name}, {fewest.gpus} GPUs"
        rows.append((name, fewest.estimate / fewest.gpus))
    return Table("Placement", ("instances", "requests/s per GPU"), rows)


def _colocated_table(title: str, systems: Sequence[Colocated]) -> Table:
    rows = [(c.name, c.gpus, c.goodput, c.goodput_per_gpu) for c in systems]
    return Table(title, ("name", "gpus", "goodput", "goodput_per_gpu"), rows)


def _configurations(search: Search, placement: Placement) -> Table:
    best = placement.deployment
    prompt = _mean_prompt(search)
    rows = []
    for prefill, decode in zip(placement.prefill_phases, placement.decode_phases, strict=True):
        replica = prefill.replica
        rows.append(
            (
                prefill.name,
                replica.gpus,
                replica.kv_tokens,
                prefill.goodput,
                prefill.per_gpu,
                _prefill_reason(prefill, best.prefill, prompt),
                decode.goodput,
                decode.per_gpu,
                _decode_reason(decode, best.decode),
            )
        )
    columns = (
        "configuration",
        "gpus",
        "kv_tokens",
        "prefill_goodput",
        "prefill_per_gpu",
        "prefill_reason",
        "decode_goodput",
        "decode_per_gpu",
        "decode_reason",
    )
    return Table("Configurations", columns, rows)


def _mean_prompt(search: Search) -> int:
    rng = random.Random(search.bench.seed)
    return round(fmean(search.space.workload.draw(rng)[0] for _ in range(1000)))


def _prefill_reason(phase: Phase, best: Phase, prompt: int) -> str:
    if phase.obstacle is not None:
        return phase.obstacle
    if phase is best:
        return "chosen"
    mine, theirs = (p.replica.steps.prefill_ns([prompt]) / 1e6 for p in (phase, best))
    work, best_work = mine * phase.replica.tp, theirs * best.replica.tp
    told = (
        f"a {prompt}-token prompt takes {mine:.0f} ms, {work:.0f} GPU-ms (chosen: {best_work:.0f})"
    )
    if phase.per_gpu > best.per_gpu:
        return f"more per GPU, but no deployment in the GPU limit is better with it; {told}"
    if work <= best_work * 1.02:
        return f"{told}: the targets leave less room to queue behind longer passes"
    return told


def _decode_reason(phase: Phase, best: Phase) -> str:
    if phase.obstacle is not None:
        return phase.obstacle
    if phase is best:
        return "chosen"
    kv, best_kv = (p.replica.kv_tokens // p.replica.gpus for p in (phase, best))
    step, best_step = (p.replica.steps.decode(128)[0] / 1e6 for p in (phase, best))
    told = (
        f"{kv:,} KV tokens a GPU (chosen: {best_kv:,}), a step of 128 takes {step:.1f} ms plus "
        f"context (chosen: {best_step:.1f})"
    )
    if phase.per_gpu > best.per_gpu:
        return f"more per GPU, but no deployment in the GPU limit is better with it; {told}"
    return told


def _points(placement: Placement) -> list[Point]:
    """All deployments, and the baselines. On the Pareto front: nothing else gives as much with
    as few GPUs."""
    chosen = placement.deployment
    values = {d.name: (d.gpus, d.estimate, "phase by phase") for d in placement.considered}
    values[chosen.name] = (chosen.gpus, placement.checked_goodput, "disaggregated, simulated")
    for system in placement.colocated:
        values[system.name] = (system.gpus, system.goodput, "colocated, simulated")
    points = []
    for name, (gpus, goodput, family) in sorted(values.items(), key=lambda item: item[1]):
        front = not any(
            g <= gpus and r >= goodput and (g, r) != (gpus, goodput) for g, r, _ in values.values()
        )
        points.append(Point(gpus, goodput, name, family, front))
    return points
