"""`blitzd client`: a recorded load on a running server, scaled to what it can bear."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from blitzd.bench.client import Planned, play
from blitzd.bench.report import as_text, line, report
from blitzd.sim.errors import InputError
from blitzd.sim.traces import load_trace

Positive = Annotated[float, Parameter(validator=Number(gt=0))]
Tokens = Annotated[int, Parameter(validator=Number(gte=1, lte=1_000_000))]


def client(
    *,
    trace: Path,
    url: str = "http://127.0.0.1:11236",
    model: str = "smollm2-135m",
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    speed: Positive = 1.0,
    prompt_scale: Positive = 1.0,
    output_scale: Positive = 1.0,
    max_prompt: Tokens = 4096,
    max_output: Tokens = 1024,
    seed: int = 0,
    timeout: Positive = 600.0,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    json: bool = False,
) -> int:
    """Send the requests of a trace at their times and report latencies.

    Exit code 1 if any request failed.

    Parameters
    ----------
    trace
        Azure, BurstGPT, Mooncake, Bailian or LLMServingSim format.
    url
        Of an OpenAI server.
    model
        Its name for the model.
    limit
        The first so many requests.
    speed
        So much faster than recorded.
    prompt_scale
        Prompts are so many times as long.
    output_scale
        Outputs are so many times as long.
    max_prompt
        No prompt is longer, in tokens.
    max_output
        No output is longer.
    seed
        Of the prompts' tokens.
    timeout
        Seconds for each request.
    output
        Write each request's outcome into this file, as JSON lines in the trace's order.
    json
        Print JSON.
    """
    try:
        recorded = load_trace(trace, limit)
    except InputError as error:
        print(f"blitzd client: {error}", file=sys.stderr)
        return 2
    plan = [
        Planned(
            request.arrival_ns / 1e9 / speed,
            min(max_prompt, max(1, round(request.prompt_tokens * prompt_scale))),
            min(max_output, max(1, round(request.output_tokens * output_scale))),
        )
        for request in recorded
    ]
    outcomes = asyncio.run(play(url.rstrip("/"), model, plan, seed=seed, timeout_s=timeout))
    if output is not None:
        lines = b"".join(msgspec.json.encode(line(outcome)) + b"\n" for outcome in outcomes)
        output.write_bytes(lines)
    found = report(outcomes)
    print(msgspec.json.encode(found).decode() if json else as_text(found))
    return 1 if found["failed"] else 0
