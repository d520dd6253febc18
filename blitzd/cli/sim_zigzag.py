"""`blitzd sim zigzag`: one live pair."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from blitzd.sched.zigzag import Policy
from blitzd.sim import zigzag as module


def zigzag(
    *,
    recorded: Annotated[list[Path] | None, Parameter(consume_multiple=True)] = None,
    layers: Annotated[int, Parameter(validator=Number(gte=1))] = 30,
    layer_ms: Annotated[float, Parameter(validator=Number(gt=0))] = 5.0,
    load: Annotated[float, Parameter(validator=Number(gt=0))] = 6.0,
    embedding: Annotated[float, Parameter(validator=Number(gte=0))] = 8.0,
    rate: Annotated[float, Parameter(validator=Number(gt=0))] = 1.75,
    trials: Annotated[int, Parameter(validator=Number(gte=1, lte=1000))] = 30,
    cap: bool = True,
    seed: int = 0,
    draw: Policy | None = None,
    plot: Path | None = None,
    json: bool = False,
    csv: Path | None = None,
) -> None:
    """What serving during a load gains: every policy on the same arrivals and layers.

    Parameters
    ----------
    recorded
        JSON files of loads that happened; the options that shape a load are not used then.
    layers
        Of the model.
    layer_ms
        Time of one layer of a request.
    load
        Time for a layer to arrive, in executions of one.
    embedding
        Time for the embedding to arrive, before the first layer, in layers. 8 is
        SmolLM2-135M's.
    rate
        Arrivals, in what one replica serves.
    trials
        Loads, of which the figures are pooled.
    cap
        Bound what is pending on New as BlitzScale does.
    seed
        Of the first trial's arrivals; the others follow.
    draw
        Print the first load under this policy, a row a request.
    plot
        PNG of the first load, layers over time, under the drawn policy (ilp_free).
    json
        Print the report as JSON.
    csv
        Directory for the table as CSV.
    """
    from blitzd.cli.sim import emit, failures

    with failures():
        if recorded:
            loads = [module.read_trial(path, cap) for path in recorded]
            asked: dict[str, object] = {"recorded": [path.name for path in recorded], "cap": cap}
        else:
            shape = module.Shape(layers, round(layer_ms * 1e6), load, embedding, rate, cap)
            loads = [shape.trial(seed + index) for index in range(trials)]
            asked = {"layers": layers, "layer_ms": layer_ms, "layer_load": load}
            asked |= {"embedding": embedding, "rate": rate, "cap": cap, "seed": seed}
        report, table = module.compare(loads, asked)
    if draw is not None or plot is not None:
        # Only here: loading matplotlib takes longer than most commands.
        from blitzd.sim import zigzag_drawing

        pair = loads[0].pair
        outcome = module.run_policy(pair, draw or Policy.ILP_FREE)
        if draw is not None:
            print(zigzag_drawing.as_text(pair, outcome), file=sys.stderr if json else sys.stdout)
        if plot is not None:
            zigzag_drawing.plot(pair, outcome, plot)
    emit(report, [table], json, csv)
    if not json:
        share = report["embedding"]
        assert isinstance(share, dict)
        print(
            f"ilp_free is {share['gap_ms']:.4g} ms above a New that has everything; the embedding, "
            f"which arrives first, is {share['share']:.0%} of that"
        )
