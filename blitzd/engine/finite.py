"""NaN and infinity: found in the request that they belong to, before they reach another."""

import torch

from blitzd.sched import StepPlan


@torch.inference_mode()
def rows_not_finite(rows: torch.Tensor) -> list[int]:
    """Those of [rows, width] that hold a NaN or an infinity.

    Their sums are not finite either, and a sum takes a thirtieth of the time that a look at
    every number does. Sums of large numbers may overflow, so only the look decides.
    """
    if bool(rows.sum(1).isfinite().all()):
        return []
    found: list[int] = (~rows.isfinite().all(1)).nonzero().flatten().tolist()
    return found


def spoilt_chunks(plan: StepPlan, hidden: torch.Tensor) -> dict[int, str]:
    """Ids of the sequences whose rows of `hidden`, those of `plan`, are not all finite, and
    the positions that were computed for them. What attention has of such a row has spread to
    the request's later rows, and with some kernels to the earlier ones of its chunk."""
    spoilt: dict[int, str] = {}
    rows = rows_not_finite(hidden)
    end = 0
    for chunk in plan.chunks if rows else ():
        start, end = end, end + chunk.count
        if any(start <= row < end for row in rows):
            positions = (chunk.start, chunk.start + chunk.count)
            spoilt[chunk.sequence.id] = told("hidden states", *positions)
    return spoilt


def told(what: str, first: int, last: int) -> str:
    """The error of a request whose numbers at positions [first, last) are not finite."""
    where = f"position {first}" if last - first == 1 else f"positions {first} to {last - 1}"
    return f"the model's {what} at {where} are not finite (NaN or infinity)"
