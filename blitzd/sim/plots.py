"""Figures, drawn without a display."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from blitzd.sim.batching import DECODE_STEP_NS, StepCount
from blitzd.sim.report import Point


def plot_slots(static: StepCount, continuous: StepCount, slots: int, path: Path) -> None:
    """Slots in use over time for both modes, on one time axis."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, run, name in ((upper, static, "static"), (lower, continuous, "continuous")):
        seconds, used = _staircase(run)
        axes.fill_between(seconds, used, step="post", alpha=0.6)
        axes.axhline(slots, color="grey", linewidth=0.8, linestyle="--")
        util = run.slot_util(slots)
        axes.set_title(f"{name}: {run.total_steps} steps, {util:.0%} of {slots} slots used")
        axes.set_ylabel("slots in use")
    lower.set_xlabel("seconds (8 ms a decode step)")
    save(figure, path)


def _staircase(run: StepCount) -> tuple[list[float], list[int]]:
    seconds, used, step = [], [], 0
    for steps, slots in run.slots:
        seconds.append(step * DECODE_STEP_NS / 1e9)
        used.append(slots)
        step += steps
    return [*seconds, step * DECODE_STEP_NS / 1e9], [*used, 0]


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def plot_pareto(title: str, points: Sequence[Point], chosen: str, path: Path) -> None:
    """GPUs against goodput. Labels only on the Pareto front, which is joined, and on the
    chosen deployment; what takes more than twice its GPUs is left out."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    limit = 2 * next(point.gpus for point in points if point.label == chosen)
    shown = [point for point in points if point.gpus <= limit]
    front = sorted({(point.gpus, point.goodput) for point in shown if point.on_front})
    axes.step([x for x, _ in front], [y for _, y in front], where="post", color="grey")
    for family in sorted({point.family for point in shown}):
        members = [point for point in shown if point.family == family]
        axes.scatter([p.gpus for p in members], [p.goodput for p in members], label=family)
    labels: dict[tuple[int, float], list[str]] = {}
    for point in shown:
        if point.on_front or point.label == chosen:
            mark = " (chosen)" if point.label == chosen else ""
            labels.setdefault((point.gpus, point.goodput), []).append(point.label + mark)
    for position, names in labels.items():
        text = "\n".join(names[:3])
        axes.annotate(text, position, textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_title(title)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("goodput, requests/s")
    axes.margins(0.15)
    axes.legend()
    save(figure, path)
