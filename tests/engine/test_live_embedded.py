"""The embedded model on a live pair: the tokens that transformers' logits imply, wherever a
request is cut between the two, and its KV in both halves."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from blitzd.engine.catalogue import CATALOGUE, DEFAULT_MODEL, is_pulled, prepared_dir, resolve
from blitzd.engine.layout import read_model_file
from blitzd.engine.prepare import prepare
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.live_sides import Side, relay
from tests.engine.test_live_pairs import decoded, emptied, first_token, follow, world
from tests.engine.test_worker import run
from tests.engine.workers import Zygote, up

PATH = Path(__file__).parent.parent / "data/goldens/smollm2-135m-float32.json"
CASES = {case["name"]: case for case in json.loads(PATH.read_text())["cases"]}
LENGTH = 8
ATOL = 1e-5
"""Of float32 KV. Both ways do the same sums on the same shapes: here it is equal to the bit."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_pulled(CATALOGUE[DEFAULT_MODEL]), reason="blitzd model pull was not run"
    ),
]


def golden(number: int, name: str) -> pb.Request:
    return pb.Request(
        request_id=number,
        prompt_tokens=CASES[name]["prompt_ids"],
        max_tokens=LENGTH,
        sampling=pb.Sampling(ignore_eos=True),
    )


@pytest.fixture(scope="module")
def model() -> Path:
    return prepare(resolve(DEFAULT_MODEL), "float32", prepared_dir())


def decode(target: Side, one: pb.Request, halves: list[tuple[Side, int, int]]) -> list[int]:
    """All tokens of a request whose first is there: `halves` hold its KV of layers [a, b)."""
    blocks = target.stepper.reserve(one)
    for side, first, last in halves:
        if first < last:
            _, theirs = side.stepper.held(one.request_id, (first, last))
            there = side.cache.tensor[first:last][:, :, theirs[: len(blocks)]]
            target.cache.tensor[first:last][:, :, blocks] = there
    target.stepper.adopt(one.request_id, lease=1)
    found = list(one.output_tokens)
    while len(found) < LENGTH:
        step = target.stepper.begin()
        assert step is not None
        report = target.stepper.finish(step, target.stepper.compute(step))
        found += report.token_ids
    return found


@pytest.mark.parametrize("name", ["chat-0", "length-129"])
def test_every_split_of_the_embedded_model_has_its_tokens_and_its_kv(
    model: Path, name: str
) -> None:
    layers, expected = read_model_file(model).layout.layers, CASES[name]["output_ids"][:LENGTH]
    alone, target = Side(model), Side(model)
    for side in (alone, target):
        side.live.set_ready(layers)
    alone.stepper.prefill(golden(1, name), hold=True)
    assert alone.step() and alone.tokens == {1: expected[0]}
    unsplit = alone.stepper.held(1)
    assert unsplit[0] == len(CASES[name]["prompt_ids"])
    worst = 0.0
    for split in range(layers + 1):
        new, old = Side(model, split), Side(model, layers)
        new.stepper.prefill(golden(1, name), hold=True)
        while new.step():
            pass
        maker = new
        if split < layers:
            one = new.live.ask()
            assert one is not None and one.done == split
            relay(new, old, one)
            assert old.step() and not new.tokens
            maker = old
        assert maker.tokens == {1: expected[0]}
        halves = [(new, 0, split), (old, split, layers)]
        for side, first, last in halves:
            if first < last:
                worst = max(worst, difference(alone, unsplit, side, first, last))
        again = golden(1, name)
        again.output_tokens = [expected[0]]
        assert decode(target, again, halves) == expected, split
    assert worst <= ATOL
    print(f"{name}: {layers + 1} splits, KV within {worst:.1e}")


def difference(
    alone: Side, unsplit: tuple[int, list[int]], side: Side, first: int, last: int
) -> float:
    """The largest, of the KV of layers [first, last) of request 1."""
    tokens, blocks = side.stepper.held(1, (first, last))
    assert tokens == unsplit[0]
    theirs = side.cache.tensor[first:last][:, :, blocks].flatten(2, 3)[:, :, :tokens]
    ours = alone.cache.tensor[first:last][:, :, unsplit[1]].flatten(2, 3)[:, :, :tokens]
    return float(torch.max(torch.abs(ours - theirs)))


def test_workers_share_requests_of_the_embedded_model_while_its_layers_arrive(
    zygotes: Zygote, model: Path, hollow: Path
) -> None:
    names = ["chat-0", "chat-3", "plain-4", "length-64", "length-129", "chat-5", "plain-7", "one"]
    draw = random.Random(7)

    async def test() -> None:
        target = await up(zygotes, "target", model, 64, verify_kv=True)
        async with world(zygotes, model, hollow) as (new, old):
            following = follow(old, new.client, pb.Transport.UCX)
            arriving = asyncio.create_task(arrive(new.until))
            for number, name in enumerate(names, 1):
                await new.client.prefill(golden(number, name), hold=True)
                await asyncio.sleep(draw.random() * 0.2)
            await arriving
            await new.loading
            for number, name in enumerate(names, 1):
                made_by = await first_token(number, new.client, old)
                one = golden(number, name)
                found = await decoded(target, number, new.client, made_by, pb.Transport.UCX, one)
                assert found == CASES[name]["output_ids"][:LENGTH]
            reply = await following
            assert not reply.fault and reply.taken > 0
            splits = [old.relayed.get(number, 0) for number in range(1, len(names) + 1)]
            print(f"{reply.taken} of {len(names)} ended at Old, after {splits} layers on New")
            assert any(splits), "nothing was cut between the two"
            await emptied(new.client, old, target)
        await target.close()

    async def arrive(until: Callable[[int], Awaitable[None]]) -> None:
        for layer in range(1, read_model_file(model).layout.layers + 1):
            await until(layer)
            await asyncio.sleep(0.02)

    run(test(), 120)
