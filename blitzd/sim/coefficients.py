"""Measured step times from files: DistServe's profiler, splitwise-sim's table, our own.

Our own profile is JSON: {"profile": "blitzd-step-times/1", "model": NAME, "runs": [{"tp": T,
"prefill": [[tokens, ns], ...], "decode": [[batch, context_tokens, ns], ...]}, ...]}; one
prompt of `tokens` a prefill sample, `context_tokens` summed over the batch.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blitzd.sim.data import DISTSERVE_CAPACITY
from blitzd.sim.errors import InputError
from blitzd.sim.steptimes import LinearSteps

PROFILE = "blitzd-step-times/1"


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Step times of one model by tensor parallel size."""

    source: str
    by_tp: dict[int, LinearSteps]
    kv_tokens: dict[tuple[int, int], int]
    """Measured KV capacity by (tp, pp), where the source has one."""
    fit_error: float
    """Median relative error of the fit against the samples; 0 for given coefficients."""


def load_coefficients(path: Path, model: str, gpu: str) -> Coefficients:
    """Reads any of the three formats. Raises InputError naming what the file has."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: not JSON: {error}") from error
        if document.get("profile") == PROFILE:
            return _own_profile(path, document, model)
        return _distserve(path, document, model)
    return _splitwise(path, text, model, gpu)


def _distserve(path: Path, document: dict[str, Any], model: str) -> Coefficients:
    key = f"facebook/{model}"
    if key not in document:
        raise InputError(f"{path}: model: {model!r} is not among {', '.join(document)}")
    by_tp = {}
    for tp, entry in document[key].items():
        try:
            fixed, linear, square = entry["prefill"]
            small, large = (
                tuple(round(x * 1e6) for x in entry[name])
                for name in ("decoding_smallbs", "decoding_largebs")
            )
            threshold = entry["decoding_large_small_bs_threshold"]
            by_tp[int(tp)] = LinearSteps(
                (round(fixed * 1e6), round(linear * 1e6), square * 1e6),
                (small[0], small[1], small[2]),
                (large[0], large[1], large[2]),
                int(threshold),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"{path}: {key}: tp {tp}: not a DistServe profile: {error}") from error
    return Coefficients(f"{path.name}, A100-80GB", by_tp, _distserve_capacity(key), 0.0)


def _distserve_capacity(key: str) -> dict[tuple[int, int], int]:
    with DISTSERVE_CAPACITY.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["model"] == key]
    return {(int(row["tp"]), int(row["pp"])): int(row["max_num_tokens"]) for row in rows}


def _own_profile(path: Path, document: dict[str, Any], model: str) -> Coefficients:
    if document.get("model") != model:
        raise InputError(f"{path}: model: it is of {document.get('model')!r}, not {model!r}")
    by_tp, errors = {}, []
    for run in document.get("runs", []):
        try:
            prefill = [(n, n * n, ns) for n, ns in run["prefill"]]
            decode = [(context, batch, ns) for batch, context, ns in run["decode"]]
            by_tp[int(run["tp"])], fit_error = _fit(prefill, decode)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: runs: not a {PROFILE} run: {error}") from error
        errors.append(fit_error)
    if not by_tp:
        raise InputError(f"{path}: runs: at least one is needed")
    return Coefficients(path.name, by_tp, {}, max(errors))


def _splitwise(path: Path, text: str, model: str, gpu: str) -> Coefficients:
    rows = list(csv.DictReader(text.splitlines()))
    if not rows or "prompt_time" not in rows[0]:
        raise InputError(f"{path}: neither a JSON profile nor a splitwise-sim perf_model.csv")
    wanted = (model.replace("llama-2-", "llama2-"), f"{gpu}-80gb")
    samples: dict[int, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        if (row["model"], row["hardware"]) == wanted:
            samples[int(row["tensor_parallel"])].append(row)
    if not samples:
        there = sorted({f"{row['model']} on {row['hardware']}" for row in rows})
        raise InputError(f"{path}: {wanted[0]} on {wanted[1]} is not among {', '.join(there)}")
    by_tp, errors = {}, []
    for tp, group in samples.items():
        prefill, decode = [], []
        for row in _plausible(group):
            prompt, batch = int(row["prompt_size"]), int(row["batch_size"])
            context = round(batch * (prompt + int(row["token_size"]) / 2))
            prefill.append((batch * prompt, batch * prompt**2, float(row["prompt_time"]) * 1e6))
            decode.append((context, batch, float(row["token_time"]) * 1e6))
        by_tp[tp], error = _fit(prefill, decode)
        errors.append(error)
    return Coefficients(f"{path.name}, {wanted[1]}", by_tp, {}, max(errors))


def _plausible(group: list[dict[str, str]]) -> list[dict[str, str]]:
    """Without runs that prefilled faster than a smaller batch of the same prompts: in the
    table those are batches that did not fit (llama2-70b, TP2, batch 64)."""
    slowest: dict[str, float] = {}
    kept = []
    for row in sorted(group, key=lambda row: int(row["batch_size"])):
        size, took = row["prompt_size"], float(row["prompt_time"])
        if took >= slowest.get(size, 0) / 2:
            kept.append(row)
            slowest[size] = max(slowest.get(size, 0), took)
    return kept


Sample = tuple[float, float, float]


def _fit(prefill: Sequence[Sample], decode: Sequence[Sample]) -> tuple[LinearSteps, float]:
    """Non-negative least squares of relative error; (x1, x2, ns) samples each."""
    if len(prefill) < 3 or len(decode) < 3:
        raise ValueError("at least three prefill and three decode samples are needed")
    first, prefill_error = _relative_fit(prefill)
    second, decode_error = _relative_fit(decode)
    step = (round(second[0]), round(second[1]), round(second[2]))
    steps = LinearSteps((round(first[0]), round(first[1]), first[2]), step, step, 1)
    return steps, max(prefill_error, decode_error)


def _relative_fit(samples: Sequence[Sample]) -> tuple[list[float], float]:
    table = np.array(samples, dtype=float)
    features = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]])
    target = table[:, 2]
    solution = nonnegative_lstsq(features / target[:, None], np.ones(len(table)))
    error = np.median(np.abs(features @ solution / target - 1))
    return [float(x) for x in solution], float(error)


def nonnegative_lstsq(
    features: np.ndarray[Any, np.dtype[np.float64]], target: np.ndarray[Any, np.dtype[np.float64]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Least squares with no negative coefficient, by dropping the most negative until none is.

    Columns may differ by many orders of magnitude; they are scaled first.
    """
    columns = list(range(features.shape[1]))
    scale = np.maximum(np.abs(features).max(axis=0), 1e-300)
    while columns:
        solution = np.linalg.lstsq(features[:, columns] / scale[columns], target, rcond=None)[0]
        if solution.min() >= 0:
            full = np.zeros(features.shape[1])
            full[columns] = solution / scale[columns]
            return full
        columns.pop(int(solution.argmin()))
    return np.zeros(features.shape[1])
