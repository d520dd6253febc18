"""What arrives: prompt and output lengths, and Poisson arrivals at any rate."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blitzd.sim.arrivals import poisson_arrivals
from blitzd.sim.data import SHAREGPT_LENGTHS
from blitzd.sim.errors import InputError
from blitzd.sim.lane import Job
from blitzd.sim.traces import load_trace

Lengths = tuple[int, int]
"""(prompt tokens, output tokens)"""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    longest: int
    """Tokens, prompt and output together, that a replica must be able to hold."""
    longest_prompt: int
    draw: Callable[[random.Random], Lengths]

    def jobs(self, count: int, rate_per_s: float, seed: int) -> list[Job]:
        """`count` jobs at Poisson times. Lengths and pattern depend on the seed alone."""
        rng = random.Random(seed)
        arrivals = poisson_arrivals(count, rate_per_s, seed + 1)
        return [Job(arrival, *self.draw(rng)) for arrival in arrivals]


def lognormal(mean: float, sigma: float, low: int, high: int) -> Callable[[random.Random], int]:
    """Whole lengths, log-normal with the given mean before clipping to [low, high]."""
    mu = math.log(mean) - sigma**2 / 2

    def draw(rng: random.Random) -> int:
        return min(high, max(low, round(rng.lognormvariate(mu, sigma))))

    return draw


def chat() -> Workload:
    """The placement document's: prompts about 1000 tokens, outputs about 250."""
    prompt, output = lognormal(1000, 1.0, 16, 8000), lognormal(250, 1.0, 2, 2000)
    return Workload("chat", 10_000, 8000, lambda rng: (prompt(rng), output(rng)))


def empirical(name: str, path: Path) -> Workload:
    """Lengths drawn, in pairs, from a trace or a file of lengths."""
    lengths = [(r.prompt_tokens, r.output_tokens) for r in load_trace(path)]
    longest = max(prompt + output for prompt, output in lengths)
    prompt = max(prompt for prompt, _ in lengths)
    return Workload(name, longest, prompt, lambda rng: rng.choice(lengths))


def find_workload(name: str | None, context_tokens: int) -> Workload:
    """`chat`, `sharegpt`, or a trace file. By default `chat` where the model's context holds
    it, else `sharegpt`. Raises InputError."""
    if name is None:
        name = "chat" if chat().longest <= context_tokens else "sharegpt"
    if name == "chat":
        return chat()
    if name == "sharegpt":
        return empirical(name, SHAREGPT_LENGTHS)
    path = Path(name)
    if not path.is_file():
        raise InputError(f"workload: {name!r} is neither chat nor sharegpt nor a trace file")
    return empirical(path.name, path)
