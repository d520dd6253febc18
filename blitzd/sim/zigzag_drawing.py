"""The zigzag, drawn: a row a request as text, or layers over time as a figure."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from blitzd.sched.pair_model import Outcome, Pair
from blitzd.sim.plots import save

ROWS = 40


def as_text(pair: Pair, outcome: Outcome, width: int = 96) -> str:
    """Time to the right, over `width` columns. `.` waits, `n` runs on New, `O` on Old; the
    first row has a `|` where a layer is there."""
    end = max(outcome.finish_ns[:ROWS], default=1)

    def column(at_ns: int) -> int:
        return min(width - 1, at_ns * width // end)

    def columns(begin_ns: int, end_ns: int) -> range:
        first = column(begin_ns)
        return range(first, max(first + 1, end_ns * width // end))

    marks = [" "] * width
    for at in pair.ready_ns:
        if at <= end:
            marks[column(at)] = "|"
    lines = [f"{'layers':>7} {''.join(marks).rstrip()}"]
    for index, one in enumerate(pair.arrivals[:ROWS]):
        row = [" "] * width
        finish = outcome.finish_ns[index]
        for at in columns(one.at_ns, finish):
            row[at] = "."
        for run in outcome.runs:
            if run.request == index:
                for at in columns(run.begin_ns, run.end_ns):
                    row[at] = "n" if run.on_new else "O"
        lines.append(f"{index:>7} {''.join(row).rstrip()}")
    lines.append(
        f"{'':>7} 0 to {end / 1e6:.4g} ms; n: on New, O: on Old, .: waits, |: a layer came"
    )
    return "\n".join(lines)


def plot(pair: Pair, outcome: Outcome, path: Path) -> None:
    """Layers over time: above what New runs under its watermark, below what Old runs."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    ready_ms = [0.0, *(at / 1e6 for at in pair.ready_ns), max(outcome.finish_ns) / 1e6]
    steps = [0, *range(1, pair.layers + 1), pair.layers]
    upper.step(ready_ms, steps, where="post", color="black", linewidth=1, label="layers there")
    for run in outcome.runs:
        axes = upper if run.on_new else lower
        times = (run.begin_ns / 1e6, run.end_ns / 1e6)
        axes.plot(times, (run.first, run.last), color=f"C{run.request % 10}", linewidth=2)
        if not run.on_new:
            axes.annotate(str(run.request), (times[0], run.first), fontsize=7)
    upper.set_title("New: layers that it has, one at a time")
    lower.set_title("Old: the rest, a request at a time (numbers: order of arrival)")
    upper.legend(loc="upper left")
    lower.set_xlabel("ms since the load began")
    for axes in (upper, lower):
        axes.set_ylabel("layer")
    save(figure, path)
