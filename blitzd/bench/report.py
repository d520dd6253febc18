"""What a run came to: latencies of what succeeded, failures beside them by their reasons."""

from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Any

from blitzd.bench.client import LATE_S, Outcome

PERCENTILES = (50, 90, 95, 99)


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Times in ms. A percentile is a value that was measured (nearest rank)."""
    done = [o for o in outcomes if not o.error]
    late = [o.sent_s - o.planned.at_s for o in outcomes]
    took_s = max((o.sent_s + o.last_s for o in done), default=0.0)
    tokens = sum(o.tokens for o in done)
    return {
        "requests": len(outcomes),
        "succeeded": len(done),
        "failed": dict(Counter(o.error for o in outcomes if o.error).most_common()),
        "output_tokens": tokens,
        "seconds": round(took_s, 3),
        "tokens_per_s": round(tokens / took_s, 1) if took_s else 0.0,
        "ttft_ms": _spread([o.first_s for o in done]),
        "tpot_ms": _spread([o.tpot_s for o in done if o.tpot_s is not None]),
        "itl_ms": _spread([gap for o in done for gap in o.gaps_s]),
        "e2e_ms": _spread([o.last_s for o in done]),
        "sent_late": sum(1 for lag in late if lag > LATE_S),
        "sent_late_max_ms": round(max(late, default=0.0) * 1000, 1),
    }


def line(outcome: Outcome) -> dict[str, Any]:
    """One request for a file, times in ms; `ttft_ms` and `e2e_ms` are absent for a failed one."""
    planned = outcome.planned
    shown: dict[str, Any] = {
        "id": outcome.id,
        "error": outcome.error,
        "planned_s": round(planned.at_s, 6),
        "sent_s": round(outcome.sent_s, 6),
        "prompt_tokens": planned.prompt_tokens,
        "max_tokens": planned.output_tokens,
    }
    if outcome.error:
        return shown
    return shown | {
        "output_tokens": outcome.tokens,
        "text_digest": outcome.text_digest,
        "ttft_ms": round(outcome.first_s * 1000, 3),
        "e2e_ms": round(outcome.last_s * 1000, 3),
        "max_gap_ms": round(max(outcome.gaps_s, default=0.0) * 1000, 3),
    }


def _spread(seconds: list[float]) -> dict[str, float] | None:
    """None: nothing was measured, which is not 0."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{p}": ordered[ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES}
    found |= {"mean": sum(ordered) / len(ordered), "max": ordered[-1]}
    return {name: round(value * 1000, 2) for name, value in found.items()}


def as_text(found: dict[str, Any]) -> str:
    failed = sum(found["failed"].values())
    lines = [
        f"{found['requests']} requests: {found['succeeded']} succeeded, {failed} failed",
        *(f"  failed: {count} {reason}" for reason, count in found["failed"].items()),
        f"{found['output_tokens']} tokens in {found['seconds']} s,"
        f" {found['tokens_per_s']} tokens/s",
        "",
        f"{'ms':<6}" + "".join(f"{name:>10}" for name in (*map(_name, PERCENTILES), "mean", "max")),
    ]
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread = found[f"{name}_ms"]
        cells = [f"{v:>10.1f}" for v in spread.values()] if spread else ["   nothing was measured"]
        lines.append(f"{name:<6}" + "".join(cells))
    if found["sent_late"]:
        lines += [
            "",
            f"{found['sent_late']} were sent late, by up to {found['sent_late_max_ms']} ms",
        ]
    return "\n".join(lines)


def _name(percentile: int) -> str:
    return f"p{percentile}"
