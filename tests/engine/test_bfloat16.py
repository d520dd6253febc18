"""How far bfloat16 takes the embedded model from float32, teacher-forced on the goldens' texts:
KL divergence of the next token's distribution, and how often the likeliest token is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from blitzd.engine.batch import BatchLayout
from blitzd.engine.catalogue import CATALOGUE, DEFAULT_MODEL, is_pulled, prepared_dir, resolve
from blitzd.engine.model_config import Dtype
from blitzd.engine.prepare import prepare
from tests.engine.test_goldens import CASES, SHORT
from tests.engines import Engine
from tests.reference import reference_model

pytestmark = pytest.mark.skipif(
    not is_pulled(CATALOGUE[DEFAULT_MODEL]), reason="blitzd model pull was not run"
)

SOME = ("chat-4", "chat-6", "plain-1", "plain-7", "length-65", "length-128")
BLOCK, CHUNK = 64, 512

# Measured over the goldens of up to 130 tokens (1,984 positions): mean 9.8e-4, p99 6.3e-3, max
# 2.9e-2, top-1 the same in 98.3 %; longer ones are nearer. Twice that is allowed, since another
# processor sums in another order. It is the format's distance and not our forward pass's:
# transformers' own model in bfloat16 is as far from float32.
MEAN_BOUND, P99_BOUND, WORST_BOUND, TOP1_BOUND = 2e-3, 1.3e-2, 6e-2, 0.95


@dataclass(frozen=True)
class Distance:
    """Of many positions, nats."""

    kl: torch.Tensor
    same: torch.Tensor

    @classmethod
    def between(cls, exact: torch.Tensor, found: torch.Tensor) -> Distance:
        """Of log-probabilities, [positions, vocab]."""
        kl = (exact.exp() * (exact - found)).sum(-1).clamp_min(0.0)
        return cls(kl, exact.argmax(-1) == found.argmax(-1))

    @classmethod
    def joined(cls, parts: list[Distance]) -> Distance:
        return cls(torch.cat([p.kl for p in parts]), torch.cat([p.same for p in parts]))

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def p99(self) -> float:
        return float(self.kl.quantile(0.99))

    @property
    def worst(self) -> float:
        return float(self.kl.max())

    @property
    def top1(self) -> float:
        return float(self.same.float().mean())

    def __str__(self) -> str:
        return (
            f"{len(self.kl)} positions: KL mean {self.mean:.2e}, p99 {self.p99:.2e}, "
            f"max {self.worst:.2e}; top-1 the same in {self.top1:.2%}"
        )


def make_engine(dtype: Dtype) -> Engine:
    directory = prepare(resolve(DEFAULT_MODEL), dtype, prepared_dir())
    return Engine(directory, blocks=96, block_tokens=BLOCK)


@pytest.fixture(scope="module")
def exact() -> Engine:
    return make_engine("float32")


@pytest.fixture(scope="module")
def rounded() -> Engine:
    return make_engine("bfloat16")


def texts(name: str) -> tuple[list[int], int]:
    """(what is fed, the first position whose distribution counts)."""
    case = CASES[name]
    return case["prompt_ids"] + case["output_ids"][:-1], len(case["prompt_ids"]) - 1


def prefilled(engine: Engine, name: str) -> torch.Tensor:
    """Log-probabilities of all output positions, computed as parts of a prompt."""
    ids, first = texts(name)
    table, found = list(range(-(-len(ids) // BLOCK))), []
    for start in range(0, len(ids), CHUNK):
        piece = ids[start : start + CHUNK]
        hidden = engine.step(BatchLayout([len(piece)], [start + len(piece)], [table]), piece)
        if start + len(piece) > first:
            found.append(engine.model.logits(hidden[max(0, first - start) :]).log_softmax(-1))
    return torch.cat(found)


def decoded(engine: Engine, name: str) -> torch.Tensor:
    """The same, a token at a time."""
    ids, first = texts(name)
    table, found, start = [list(range(-(-len(ids) // BLOCK)))], [], 0
    for count in ([first] if first else []) + [1] * (len(ids) - first):
        start += count
        hidden = engine.step(BatchLayout([count], [start], table), ids[start - count : start])
        if start > first:
            found.append(engine.model.logits(hidden[-1:]).log_softmax(-1))
    return torch.cat(found)


def assert_bounded(found: Distance) -> None:
    print(f"bfloat16 to float32, {found}")
    assert found.mean < MEAN_BOUND
    assert found.p99 < P99_BOUND
    assert found.worst < WORST_BOUND
    assert found.top1 > TOP1_BOUND


def test_as_parts_of_a_prompt(exact: Engine, rounded: Engine) -> None:
    parts = [Distance.between(prefilled(exact, n), prefilled(rounded, n)) for n in SOME]
    assert_bounded(Distance.joined(parts))


def test_a_token_at_a_time(exact: Engine, rounded: Engine) -> None:
    name = "chat-6"
    assert_bounded(Distance.between(prefilled(exact, name), decoded(rounded, name)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_goldens(exact: Engine, rounded: Engine) -> None:
    parts = [Distance.between(prefilled(exact, n), prefilled(rounded, n)) for n in CASES]
    assert_bounded(Distance.joined(parts))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_transformers_is_as_far_from_float32(exact: Engine, rounded: Engine) -> None:
    """So what is measured here is the format, and not our forward pass."""
    theirs = reference_model(rounded.arena)
    ours, others = [], []
    for name in SHORT:
        ids, first = texts(name)
        expected = prefilled(exact, name)
        ours.append(Distance.between(expected, prefilled(rounded, name)))
        with torch.inference_mode():
            logits = theirs(torch.tensor([ids])).logits[0, first:].float()
        others.append(Distance.between(expected, logits.log_softmax(-1)))
    mine, other = Distance.joined(ours), Distance.joined(others)
    print(f"ours: {mine}\ntransformers: {other}")
    assert mine.mean < 1.25 * other.mean
