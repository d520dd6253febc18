"""Figures, drawn without a display."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from blitzd.sim.batching import DECODE_STEP_NS, StepCount


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


def scatter(
    title: str,
    axis_names: tuple[str, str],
    points: Sequence[tuple[float, float, str, bool]],
    path: Path,
) -> None:
    """Labelled points (x, y, label, on the Pareto front); the front is joined."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    front = sorted((x, y) for x, y, _, on_front in points if on_front)
    axes.step([x for x, _ in front], [y for _, y in front], where="post", color="tab:orange")
    for x, y, label, on_front in points:
        axes.scatter(x, y, color="tab:orange" if on_front else "tab:blue")
        axes.annotate(label, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    axes.set_title(title)
    axes.set_xlabel(axis_names[0])
    axes.set_ylabel(axis_names[1])
    save(figure, path)
