"""The same prompts through one and several prefill and decode workers: what each says is what
one worker alone would have said."""

from itertools import cycle
from pathlib import Path

import pytest

from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import LocalReplica, request
from tests.engine.test_worker import run
from tests.engine.workers import Client, Zygote, up

LENGTH = 12
PREFIX = "It was the best of times, it was the worst of times, it was the age of wisdom, "
PROMPTS = {
    number: PREFIX * (1 + number % 3) + tail
    for number, tail in enumerate(("", "a", "it was the age of foolishness", "", "?", "!"), 1)
}


def sampled(number: int) -> pb.Request:
    sampling = {"temperature": 0.8, "seed": number} if number % 2 else {}
    return request(number, PROMPTS[number], LENGTH, **sampling)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, tuple[list[int], int]]:
    """Tokens and prefix-cache hits, one request after the other."""
    alone = LocalReplica(model)
    found = {}
    for number in PROMPTS:
        alone.prefill(sampled(number))
        output = alone.until(number)[number]
        found[number] = (output.tokens, output.cached)
    alone.close()
    return found


async def through(number: int, source: Client, target: Client) -> list[int]:
    await source.prefill(sampled(number), hold=True)
    here = (await source.until(number)).tokens
    again = sampled(number)
    again.output_tokens = list(here)
    await target.import_from(source, again, pb.Transport.MAP, lease_id=number)
    await source.stub.release_kv(pb.ReleaseKvRequest(request_ids=[number]))
    return here + (await target.until(number)).tokens


@pytest.mark.parametrize("prefills, decodes", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_any_number_on_either_side_says_the_same(
    model: Path,
    zygotes: Zygote,
    expected: dict[int, tuple[list[int], int]],
    prefills: int,
    decodes: int,
) -> None:
    """B.2 #39: and #40, one prefill worker saves as much of a prompt as one alone."""

    async def test() -> None:
        sources = [await up(zygotes, f"p{i}", model, 64) for i in range(prefills)]
        targets = [await up(zygotes, f"d{i}", model, 48, verify_kv=True) for i in range(decodes)]
        ways = zip(PROMPTS, cycle(sources), cycle(reversed(targets)), strict=False)
        for number, source, target in ways:
            tokens = await through(number, source, target)
            assert tokens == expected[number][0], (number, source.replica, target.replica)
            if prefills == 1:
                assert source.outputs[number].cached == expected[number][1]
            assert target.outputs[number].cached == 0, "counted once"
        assert any(cached for _, cached in expected.values())
        for client in (*sources, *targets):
            await client.until_blocks_used(0)
            await client.close()

    run(test())
