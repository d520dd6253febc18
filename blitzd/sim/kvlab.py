"""The lab with a KV cache that can run out, and with prompts that share their beginning.

The same live scheduler as the engine's takes the decisions (`blitzd.sched`); costs are the
lab's: 0.05 ms for each prompt token computed, computed again after a preemption too, and
8 ms a decode step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blitzd.sched import StepPlan
from blitzd.sim.arrivals import poisson_arrivals
from blitzd.sim.batching import DECODE_STEP_NS, PREFILL_NS_PER_TOKEN
from blitzd.sim.lane import Job
from blitzd.sim.replay import Replay, scheduler_for
from blitzd.sim.requests import Request
from blitzd.sim.stats import percentile

BLOCK_TOKENS = 16
PREFIX_RATE = 5.0
"""Requests per second of the prefix comparison: a load that computes prompts in time."""

HELP = """\
--kv-blocks N runs the list, all there at the start, on N KV blocks of 16 tokens and writes
  kv.txt: preemptions, tokens computed twice, tokens swapped out, the time that took, and the
  share of throughput lost against a cache without end (fewer slots in use included).
  Preemption recomputes, or swaps over --swap-gb-s.
--shared-prefix N puts the same N tokens before every prompt and writes prefix.txt: p99 TTFT
  at 5 requests/s with and without the prefix cache.
"""


@dataclass(frozen=True, slots=True)
class KvOptions:
    kv_blocks: int
    max_num_seqs: int
    preemption: Literal["recompute", "swap"]
    swap_gb_s: float
    kv_bytes_per_token: int


def lab_cost(plan: StepPlan) -> int:
    """Prompt tokens and recomputed ones at prefill cost, and one decode step if any token is
    made. A sequence that only lacks its newest token decodes."""
    prefill = sum(
        chunk.count
        for chunk in plan.chunks
        if chunk.count > 1 or chunk.start < chunk.sequence.prompt_tokens
    )
    return prefill * PREFILL_NS_PER_TOKEN + (DECODE_STEP_NS if plan.sampling else 0)


def run_kv_limited(requests: Sequence[Request], options: KvOptions) -> dict[str, int | float | str]:
    """What a bounded KV cache costs. Raises InputError for a request that it cannot hold."""
    limited = _replay(requests, options, options.kv_blocks)
    ample_blocks = sum(_blocks(r) for r in requests)
    ample = _replay(requests, options, ample_blocks)
    output = sum(r.output_tokens for r in requests)
    prompts = sum(r.prompt_tokens for r in requests)
    again = limited.totals.computed_tokens - (prompts + output - len(requests))
    tps, ample_tps = (output * 1e9 / run.now for run in (limited, ample))
    return {
        "kv_blocks": options.kv_blocks,
        "preemption": options.preemption,
        "preemptions": limited.totals.preemptions,
        "recomputed_tokens": again,
        "swapped_tokens": limited.totals.swapped_tokens,
        "preemption_ms": round(_preemption_ns(limited, again) / 1e6, 3),
        "throughput_tps": round(tps, 3),
        "unlimited_tps": round(ample_tps, 3),
        "price": round(1 - tps / ample_tps, 4),
    }


def _preemption_ns(run: Replay, recomputed: int) -> int:
    """Time spent on preempted sequences' KV alone; slots that stood empty are not in it."""
    swapped = 2 * run.totals.swapped_tokens * run.swap_ns_per_token
    return recomputed * PREFILL_NS_PER_TOKEN + swapped


def _blocks(request: Request) -> int:
    return -(-(request.prompt_tokens + request.output_tokens) // BLOCK_TOKENS)


def _replay(requests: Sequence[Request], options: KvOptions, kv_blocks: int) -> Replay:
    swap = options.kv_bytes_per_token / options.swap_gb_s if options.preemption == "swap" else 0
    budget = sum(r.prompt_tokens + r.output_tokens for r in requests) + options.max_num_seqs
    replay = Replay(
        [Job(0, *request) for request in requests],
        scheduler_for(kv_blocks, BLOCK_TOKENS, budget, options.max_num_seqs),
        lab_cost,
        swap_ns_per_token=round(swap),
    )
    replay.run()
    return replay


def run_shared_prefix(
    requests: Sequence[Request], prefix_tokens: int, max_num_seqs: int, seed: int
) -> dict[str, int | float | str]:
    """TTFT with a shared beginning that is computed once, against once a request."""
    longer = [Request(prefix_tokens + r.prompt_tokens, r.output_tokens) for r in requests]
    arrivals = poisson_arrivals(len(longer), PREFIX_RATE, seed)
    blocks = sum(_blocks(r) for r in longer)
    budget = sum(r.prompt_tokens + r.output_tokens for r in longer) + max_num_seqs
    p99, cached = [], 0
    for shared in (0, prefix_tokens):
        jobs = [Job(at, *request) for at, request in zip(arrivals, longer, strict=True)]
        scheduler = scheduler_for(blocks, BLOCK_TOKENS, budget, max_num_seqs)
        replay = Replay(jobs, scheduler, lab_cost, shared_prefix=shared)
        replay.run()
        p99.append(percentile([job.ttft_ns for job in jobs], 99))
        cached = replay.totals.cached_tokens
    return {
        "shared_prefix": prefix_tokens,
        "cached_tokens": cached,
        "p99_ttft_ms": round(p99[0] / 1e6, 3),
        "cached_p99_ttft_ms": round(p99[1] / 1e6, 3),
        "speedup": round(p99[0] / p99[1], 4),
    }
