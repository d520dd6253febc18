"""Sampling: greedy is argmax, and a draw depends on logits, seed and position alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from blitzd.engine.sampler import SamplingParams, sample


def test_draws_stay_as_they_are() -> None:
    """A request may go on with another version of the libraries, or of ours."""
    logits = torch.linspace(-3, 3, 1001).expand(6, -1)
    seeds = (0, 1, 1, 2**63, 2**64 - 1, 7)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    assert sample(logits, params, (0, 0, 1, 5, 5, 2**40)) == [782, 740, 908, 778, 996, 660]


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """Logits differ in their last bits with the shape of the batch that they came in."""
    source = torch.Generator().manual_seed(4)
    changed = 0
    for start in range(0, 300, 60):
        logits = 3 * torch.randn(60, 49_152, generator=source)
        params = [SamplingParams(temperature=1.0, seed=11)] * 60
        places = range(start, start + 60)
        drawn = sample(logits, params, places)
        rounded = logits + 5e-6 * torch.randn(logits.shape, generator=source)
        changed += sum(a != b for a, b in zip(drawn, sample(rounded, params, places), strict=True))
    assert changed == 0


def test_draws_of_neighbouring_places_and_seeds_have_nothing_in_common() -> None:
    logits = torch.zeros(200, 49_152)
    params = [SamplingParams(temperature=1.0, seed=row // 100) for row in range(200)]
    tokens = sample(logits, params, [row % 100 for row in range(200)])
    assert len(set(tokens)) > 195
    near = [abs(a - b) < 100 for a, b in pairwise(tokens)]
    assert sum(near) < 6


def test_greedy_is_argmax() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    for params in (SamplingParams(), SamplingParams(temperature=1e-300)):
        assert sample(logits, [params] * 5, [0] * 5) == logits.argmax(-1).tolist()


def test_temperature_follows_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -float("inf"), 0.5])
    for temperature in (0.5, 1.0, 2.0):
        params = [SamplingParams(temperature=temperature, seed=9)] * 20_000
        tokens = torch.tensor(sample(logits.expand(20_000, -1), params, range(20_000)))
        expected = torch.softmax(logits / temperature, -1) * 20_000
        found = torch.bincount(tokens, minlength=5)
        assert found[3] == 0
        keep = expected > 0
        assert float(((found - expected)[keep] ** 2 / expected[keep]).sum()) < 25  # 3 degrees


def test_a_draw_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(16, 1000, generator=torch.Generator().manual_seed(2))
    params = [SamplingParams(temperature=0.3 * (row % 4), seed=row) for row in range(16)]
    positions = [row * 7 for row in range(16)]
    together = sample(logits, params, positions)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3)).tolist()
    shuffled = sample(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]
    alone = [
        sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1])[0] for i in range(16)
    ]
    assert alone == together


def test_mismatched_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows, 1 parameters and 1 positions"):
        sample(torch.zeros(2, 4), [SamplingParams()], [0])
