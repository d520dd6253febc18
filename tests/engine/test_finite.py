"""A request whose numbers overflow ends alone, with an error that says where: those beside it,
and those that get its KV blocks after it, have the tokens that they have without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from blitzd.engine.arena import Arena
from blitzd.engine.finite import rows_not_finite
from blitzd.engine.model_config import Dtype
from blitzd.engine.prepare import build
from blitzd.engine.token_logprobs import entries
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.scenario import Shape, Side
from tests.tiny import RandomSource, tiny_config

VOCAB = tiny_config().vocab
POISON = 200
"""The token id that overflows."""
LAYER = 0
HUGE = {"float64": 1e160, "float32": 1e20, "bfloat16": 1e20}
"""Its square is too large."""
BLOCK = 4
NOT_FINITE = r"the model's (hidden states|logits) at positions? \d+.* are not finite"


def overflowing(directory: Path, dtype: Dtype, part: str) -> Path:
    """A tiny model in which the keys or values of one token overflow in its first layer: of all
    embeddings only its own has anything in dimension 0, and there two factors are huge."""
    config = tiny_config(dtype, tied_head=False)
    source = RandomSource(config)
    embed = source.tensors["embed"]
    embed[:, 0] = 0.0
    embed[POISON, 0] = 1.0
    source.tensors[f"layers.{LAYER}.attn_norm"].flat[0] = HUGE[dtype]
    heads = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    rows = {"keys": range(heads, heads + keys), "values": range(heads + keys, heads + 2 * keys)}
    qkv = source.tensors[f"layers.{LAYER}.qkv"]
    qkv[:, 0] = 0.0
    for row in rows[part][:3]:
        qkv[row, 0] = HUGE[dtype]
    build(source, dtype, directory)
    return directory


class Model(NamedTuple):
    arena: Arena
    tokenizer: Tokenizer

    def side(self, blocks: int = 64, batch_tokens: int = 64, block: int = BLOCK) -> Side:
        shape = Shape(blocks, block, batch_tokens, 8)
        return Side(self.arena, self.tokenizer, shape, seed=1)


CASES = [("float32", "values"), ("float64", "keys"), ("bfloat16", "values")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = overflowing(tmp_path_factory.mktemp("model") / "tiny", *request.param)
    return Model(Arena.open(directory), Tokenizer.from_dir(directory))


@dataclass
class Client:
    """Of one replica: what its reports said, by request."""

    side: Side
    tokens: dict[int, list[int]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def ask(self, number: int, prompt: list[int], tokens: int = 8, **sampling: Any) -> None:
        self.side.stepper.prefill(asked(number, prompt, tokens, **sampling), hold=False)

    def take(self, report: pb.StepReport | None) -> None:
        assert report is not None
        assert all(report.failed_alone), report.errors
        for number, token in zip(report.request_ids, report.token_ids, strict=True):
            self.tokens.setdefault(number, []).append(token)
        self.errors.update(zip(report.failed_ids, report.errors, strict=True))

    def run(self) -> None:
        while (report := self.side.step()) is not None:
            self.take(report)
        self.side.assert_empty()


def asked(number: int, prompt: list[int], tokens: int = 8, **sampling: Any) -> pb.Request:
    """It overflows by its prompt or not at all, unless `sampling` has a bias of its own."""
    bias = {"bias_token_ids": [POISON], "bias_values": [-100.0]}
    fields = pb.Sampling(ignore_eos=True, **(bias | sampling))
    return pb.Request(request_id=number, prompt_tokens=prompt, max_tokens=tokens, sampling=fields)


def healthy(number: int, length: int) -> list[int]:
    return [(7 * number + 3 * i * i) % 150 for i in range(length)]


LENGTHS = [3, 5, 9, 14]


def alone(model: Model, prompt: list[int], tokens: int = 8) -> list[int]:
    """Its tokens where nothing overflows."""
    client = Client(model.side())
    client.ask(1, prompt, tokens)
    client.run()
    return client.tokens[1]


def assert_tokens(model: Model, client: Client, number: int, prompt: list[int]) -> None:
    expected = alone(model, prompt)
    if model.arena.config.dtype == "bfloat16":
        # How a product is rounded depends on the batch; one NaN would have ended it.
        assert len(client.tokens[number]) == len(expected)
    else:
        assert client.tokens[number] == expected


def poisoned(length: int = 11) -> list[int]:
    prompt = healthy(50, length)
    prompt[length // 2] = POISON
    return prompt


def assert_healthy(model: Model, client: Client, first: int) -> None:
    for number, length in enumerate(LENGTHS, first):
        assert number not in client.errors
        assert_tokens(model, client, number, healthy(number, length))


def ask_healthy(client: Client, first: int) -> None:
    for number, length in enumerate(LENGTHS, first):
        client.ask(number, healthy(number, length))


@pytest.mark.parametrize("batch_tokens", [8, 64])
def test_it_ends_alone_beside_others_and_its_blocks_do_no_harm(
    model: Model, batch_tokens: int
) -> None:
    client = Client(model.side(24, batch_tokens))
    ask_healthy(client, 1)
    client.ask(9, poisoned())
    client.run()
    assert set(client.errors) == {9}
    assert 9 not in client.tokens
    assert_healthy(model, client, 1)
    # All of the replica's blocks are used again, its own among them.
    for first in (11, 21, 31):
        ask_healthy(client, first)
        client.run()
        assert_healthy(model, client, first)


def test_the_error_names_the_position_at_which_a_decode_overflows(model: Model) -> None:
    client = Client(model.side())
    client.ask(1, healthy(1, 6), bias_token_ids=[POISON], bias_values=[100.0])
    client.run()
    # The first token drawn is the one that overflows, when it is computed.
    assert client.tokens == {1: [POISON]}
    assert client.errors == {
        1: "the model's hidden states at position 6 are not finite (NaN or infinity)"
    }


@pytest.mark.parametrize("batch_tokens", [8, 64])
@pytest.mark.parametrize("at", [4, 5, 9])
def test_the_prefix_cache_keeps_nothing_of_it(model: Model, at: int, batch_tokens: int) -> None:
    """Attention may spread it to earlier positions of its chunk, whose blocks have tokens that
    others begin with, too."""
    client = Client(model.side(batch_tokens=batch_tokens))
    common = healthy(1, 16)
    client.ask(1, [*common[:at], POISON, *common[at:]])
    client.take(client.side.step())
    client.ask(2, common)
    client.run()
    assert set(client.errors) == {1}
    assert_tokens(model, client, 2, common)
    client.tokens.clear()
    client.ask(2, common)
    client.ask(3, [*common[:at], POISON, *common[at:]])
    client.run()
    assert_tokens(model, client, 2, common)
    assert set(client.errors) == {1, 3}


def test_one_cancelled_while_it_is_computed_leaves_nothing_behind(model: Model) -> None:
    client = Client(model.side(24))
    client.ask(9, poisoned())
    report = client.side.step(lambda: client.side.stepper.cancel([9]))
    assert report is not None and not report.failed_ids
    for first in (1, 11, 21):
        ask_healthy(client, first)
        client.run()
        assert_healthy(model, client, first)


def test_logprobs_of_its_prompt_are_finite_or_not_told(model: Model) -> None:
    side = model.side(batch_tokens=8)
    prompt = [*healthy(1, 12), POISON, 3, 4, 5]
    side.stepper.prefill(asked(1, prompt, prompt_logprobs=2, logprobs=2), hold=False)
    told: list[float] = []
    errors: list[str] = []
    while (report := side.step()) is not None:
        for _, _, (value, top) in entries(report):
            told += [value, *(other for _, other in top)]
        errors += report.errors
    assert len(errors) == 1
    assert told and torch.tensor(told).isfinite().all()
    side.assert_empty()


def moved(model: Model, prompt: list[int]) -> tuple[Side, pb.Request, list[int], int]:
    """(a replica that holds request 1, the request as it goes on, its blocks there, tokens)."""
    source = model.side()
    source.stepper.prefill(asked(1, prompt), hold=True)
    first = source.step()
    assert first is not None and first.finish == [pb.FinishReason.HELD]
    request = asked(1, prompt)
    request.output_tokens = list(first.token_ids)
    tokens, there = source.stepper.held(1)
    return source, request, there, tokens


@pytest.mark.parametrize("plane", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_kv_that_comes_with_it_ends_the_request_it_is_of(
    model: Model, plane: int, value: float
) -> None:
    """And no other that begins with the same tokens, in the very step that finds it."""
    prompt = healthy(1, 14)
    source, request, there, tokens = moved(model, prompt)
    source.cache.tensor[2, plane, there[1], 1] = value
    client = Client(model.side(24))
    here = client.side.stepper.reserve(request)
    client.side.copy_from(source, there, here, tokens)
    client.side.stepper.adopt(1, lease=1)
    client.ask(2, prompt)
    client.run()
    if math.isnan(value) or plane == 1:
        # An infinite key may have no weight at all.
        assert set(client.errors) == {1}
    assert_tokens(model, client, 2, prompt)
    for first in (11, 21, 31):
        ask_healthy(client, first)
        client.run()
        assert_healthy(model, client, first)


def test_what_a_source_had_in_the_block_before_does_not_come_along(model: Model) -> None:
    prompt = healthy(1, 13)
    source, request, there, tokens = moved(model, prompt)
    assert tokens % BLOCK
    source.cache.tensor[:, :, there[-1], tokens % BLOCK :] = float("nan")
    client = Client(model.side())
    here = client.side.stepper.reserve(request)
    client.side.copy_from(source, there, here, tokens)
    client.side.stepper.adopt(1, lease=1)
    # Another beside it, for an attention that masks the ends of both.
    client.ask(2, healthy(2, 15))
    client.run()
    client.tokens[1][:0] = request.output_tokens
    assert_tokens(model, client, 1, prompt)
    assert_tokens(model, client, 2, healthy(2, 15))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_rows_that_are_not_finite_are_found_and_large_ones_are_not(value: float) -> None:
    rows = torch.full((4, 8), 3e38)
    assert rows_not_finite(rows) == []
    rows[1, 3] = value
    rows[3] = value
    assert rows_not_finite(rows) == [1, 3]
    rows[3, :4] = -value
    assert rows_not_finite(rows) == [1, 3]
