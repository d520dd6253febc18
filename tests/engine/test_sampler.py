"""Sampling: greedy is argmax, and a draw depends on logits, seed and position alone."""

from __future__ import annotations

import pytest
import torch

from blitzd.engine.sampler import SamplingParams, philox, sample, uniform


def test_philox_known_answers() -> None:
    """From the Random123 distribution, kat_vectors, philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    )  # fmt: skip


def test_uniform_is_uniform_and_spreads_over_seeds_and_positions() -> None:
    values = [uniform(seed, at) for seed in range(50) for at in range(200)]
    counts = torch.histc(torch.tensor(values), 20, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 50  # chi-square, 19 degrees, p < 1e-4
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    assert uniform(2**64 - 1, 5) != uniform(2**32 - 1, 5)


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
