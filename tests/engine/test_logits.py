"""Adjusting and cutting distributions, against transformers' logits processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from blitzd.engine.logits import RowContext, SamplingParams, adjust, restrict
from blitzd.engine.sampler import logprobs, sample


def random_row(seed: int, vocab: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(vocab, generator=generator)).double()


CUTS: list[tuple[dict[str, Any], Any]] = [
    ({"top_k": 1}, TopKLogitsWarper(1)),
    ({"top_k": 17}, TopKLogitsWarper(17)),
    ({"top_k": 1000}, TopKLogitsWarper(1000)),
    ({"top_p": 0.9}, TopPLogitsWarper(0.9)),
    ({"top_p": 0.01}, TopPLogitsWarper(0.01)),
    ({"min_p": 0.05}, MinPLogitsWarper(0.05)),
    ({"min_p": 1.0}, MinPLogitsWarper(1.0)),
    ({"typical_p": 0.9}, TypicalLogitsWarper(0.9)),
    ({"typical_p": 0.2}, TypicalLogitsWarper(0.2)),
]


@pytest.mark.parametrize(("changes", "theirs"), CUTS, ids=lambda value: str(value))
def test_cuts_equal_transformers(changes: dict[str, Any], theirs: Any) -> None:
    for seed in range(20):
        row = random_row(seed)
        expected = theirs(torch.zeros(1, 0, dtype=torch.long), row.unsqueeze(0))[0]
        found = restrict(row, SamplingParams(temperature=1.0, **changes))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("spread", [3.0, 0.3])
def test_top_p_of_a_large_vocabulary(spread: float) -> None:
    """Peaked, so that the nucleus is among the first that are looked at, and flat, so that
    it is not."""
    sizes = []
    for seed in range(10):
        row = random_row(seed, 8000) / 3 * spread
        expected = TopPLogitsWarper(0.9)(torch.zeros(1, 0, dtype=torch.long), row.unsqueeze(0))[0]
        found = restrict(row, SamplingParams(temperature=1.0, top_p=0.9))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        sizes.append(int((found > float("-inf")).sum()))
    assert max(sizes) < 1024 if spread > 1 else min(sizes) > 1024


def test_cuts_follow_one_another_as_in_transformers() -> None:
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.8, min_p=0.02, typical_p=0.9)
    ids = torch.zeros(1, 0, dtype=torch.long)
    for seed in range(20):
        expected = row = random_row(seed)
        for warper in (
            TopKLogitsWarper(50),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.02),
            TypicalLogitsWarper(0.9),
        ):
            expected = warper(ids, expected.unsqueeze(0))[0]
        torch.testing.assert_close(restrict(row, params), expected, rtol=0, atol=0)


def test_repetition_penalty_equals_transformers() -> None:
    prompt, output = [5, 9, 9, 200], [7, 7, 5, 100]
    row = random_row(1)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(
        torch.tensor([prompt + output]), row.clone().unsqueeze(0)
    )[0]
    params = SamplingParams(repetition_penalty=1.3)
    found = adjust(row, params, RowContext(prompt, output))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_presence_and_frequency_penalties_are_openais() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, over the output alone."""
    row = random_row(2)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    found = adjust(row, params, RowContext([1, 1, 1], [7, 7, 7, 3]))
    expected = row.clone()
    expected[7] -= 0.5 + 3 * 0.25
    expected[3] -= 0.5 + 0.25
    torch.testing.assert_close(found, expected)
    assert torch.equal(adjust(row, params, RowContext([1, 1, 1], [])), row)


def test_bias_and_mask_decide_even_the_greedy_choice() -> None:
    logits = torch.stack([random_row(3), random_row(4), random_row(5)]).float()
    before = logits.clone()
    allowed = torch.zeros(300, dtype=torch.bool)
    allowed[42] = True
    params = [SamplingParams(logit_bias=((17, 100.0),)), SamplingParams(), SamplingParams()]
    contexts = [RowContext(), RowContext(allowed=allowed), RowContext()]
    assert sample(logits, params, [0, 0, 0], contexts) == [17, 42, int(before[2].argmax())]
    assert torch.equal(logits, before)
    banned = SamplingParams(logit_bias=((int(before[2].argmax()), -100.0),))
    assert sample(logits[2:], [banned], [0]) == [int(before[2].topk(2).indices[1])]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.integers(0, 20),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
    typical_p=st.floats(0.0, 1.0),
    spread=st.floats(0.0, 1000.0),
)
def test_a_draw_is_always_a_token_that_was_left(
    seed: int, top_k: int, top_p: float, min_p: float, typical_p: float, spread: float
) -> None:
    params = SamplingParams(
        temperature=1.0, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p
    )
    row = random_row(seed, 40) * spread
    left = restrict(row, params)
    assert bool((left > float("-inf")).any())
    token = sample(row.unsqueeze(0), [params], [seed])[0]
    assert float(left[token]) > float("-inf")


def test_restricted_draws_follow_the_distribution_that_is_left() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    count = 20_000
    params = [SamplingParams(temperature=1.0, seed=4, top_k=3)] * count
    tokens = torch.tensor(sample(logits.expand(count, -1), params, range(count)))
    found = torch.bincount(tokens, minlength=5)
    expected = count * torch.softmax(logits[:3], -1)
    assert found[3:].sum() == 0
    assert float(((found[:3] - expected) ** 2 / expected).sum()) < 20  # 2 degrees, p < 1e-4


def test_logprobs_are_the_models_own() -> None:
    logits = torch.stack([random_row(6), random_row(7)])
    found = logprobs(logits, [5, 9], 3)
    expected = logits.log_softmax(-1)
    for row, token in enumerate([5, 9]):
        assert found[row].logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        best = expected[row].topk(3)
        assert [i for i, _ in found[row].top] == best.indices.tolist()
        assert [p for _, p in found[row].top] == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"typical_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": 101.0},
        {"seed": -1},
        {"seed": 1 << 64},
        {"logit_bias": ((3, float("nan")),)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_is_out_of_range_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        SamplingParams(**changes)


def test_what_cannot_be_done_is_said() -> None:
    logits = torch.zeros(1, 8)
    with pytest.raises(ValueError, match="penalties need the tokens"):
        sample(logits, [SamplingParams(presence_penalty=1.0)], [0])
    with pytest.raises(ValueError, match="logit_bias names token 8"):
        sample(logits, [SamplingParams(logit_bias=((8, 1.0),))], [0])
    with pytest.raises(ValueError, match="no token is allowed"):
        nothing = RowContext(allowed=torch.zeros(8, dtype=torch.bool))
        sample(logits, [SamplingParams()], [0], [nothing])
    with pytest.raises(ValueError, match="1 rows and 0 contexts"):
        sample(logits, [SamplingParams()], [0], [])
