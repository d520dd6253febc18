"""Cancel, release, import, prefill's end and a second lease at two real workers, in every
order and some of them at once: all is freed, and a neighbour's hand-over does not notice."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import LocalReplica, request
from tests.engine.test_handover import TRANSPORTS, pair
from tests.engine.test_worker import run
from tests.engine.workers import Client, ImportFailed, Zygote

PROMPT = "All happy families are alike"
LENGTH = 6
NEIGHBOUR = 2**32
FREED_S = 5.0


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    alone = LocalReplica(model)
    alone.prefill(request(1, PROMPT, LENGTH))
    tokens = alone.until(1)[1].tokens
    alone.close()
    return tokens


def passed_on(number: int, first: int) -> pb.Request:
    again = request(number, PROMPT, LENGTH)
    again.output_tokens = [first]
    return again


def runs_of(tokens: list[int], expected: list[int], ended: bool) -> bool:
    """Whether they are a beginning of `expected`, or several: one for each lease by which the
    request came; and the last one whole, if it `ended`."""
    places = {0}
    for token in tokens:
        again = places | {0} if places else set()
        places = {at + 1 for at in again if at < len(expected) and expected[at] == token}
    return bool(places) and (not ended or len(expected) in places)


class Race:
    def __init__(
        self, source: Client, target: Client, transport: pb.Transport, expected: list[int]
    ) -> None:
        self.source = source
        self.target = target
        self.transport = transport
        self.first = expected[0]
        self.expected = expected
        self.number = 0
        self.outcomes: dict[str, int] = {}

    async def import_(self, lease: int) -> None:
        call = passed_on(self.number, self.first)
        try:
            await self.target.import_from(self.source, call, self.transport, lease_id=lease)
        except ImportFailed as failed:
            name = failed.fault.name
        else:
            name = "arrived"
        self.outcomes[name] = self.outcomes.get(name, 0) + 1

    async def cancel(self, where: Client) -> None:
        await where.stub.cancel(pb.CancelRequest(request_ids=[self.number]), timeout=5)

    async def release(self) -> None:
        await self.source.stub.release_kv(pb.ReleaseKvRequest(request_ids=[self.number]), timeout=5)

    def moves(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            lambda: self.import_(1),
            lambda: self.import_(2),
            lambda: self.cancel(self.target),
            lambda: self.cancel(self.source),
            self.release,
        ]

    async def run(self, order: tuple[int, ...], pause_s: float | None, wait: bool) -> None:
        """`pause_s` None: each to its end before the next; `wait`: the prefill has ended."""
        self.number += 1
        await self.source.prefill(request(self.number, PROMPT, LENGTH), hold=True)
        if wait:
            await self.source.until(self.number)
        moves = self.moves()
        calls = []
        for index in order:
            call = asyncio.ensure_future(moves[index]())
            calls.append(call)
            if pause_s is None:
                await call
            else:
                await asyncio.sleep(pause_s)
        await asyncio.gather(*calls)

    async def freed(self) -> None:
        """All but what the neighbour has, once what came through has been decoded."""
        for client in (self.source, self.target):
            began = time.monotonic()
            while True:
                held = await client.holdings()
                strangers = {*held.request_ids, *held.exports} - {NEIGHBOUR}
                if not strangers and not held.transfers and not held.buffers:
                    break
                assert time.monotonic() - began < FREED_S, (client.replica, held)
                await asyncio.sleep(0.005)


@TRANSPORTS
@pytest.mark.timeout(200)
def test_every_order_frees_both_sides(
    model: Path, zygotes: Zygote, expected: list[int], transport: pb.Transport
) -> None:
    """B.2 #30, #34, #35."""

    async def test() -> None:
        source, target = await pair(zygotes, model)
        race = Race(source, target, transport, expected)
        # A neighbour waits for its hand-over all the while.
        await source.prefill(request(NEIGHBOUR, PROMPT, LENGTH), hold=True)
        await source.until(NEIGHBOUR)
        for order in itertools.permutations(range(5)):
            for pause_s, wait in ((None, True), (0.0, True), (0.0005, False)):
                await race.run(order, pause_s, wait)
            # What is decoding, not yet imported or gone, ends by itself.
            await race.freed()
        outputs = target.outputs
        assert all(runs_of(o.tokens, expected[1:], o.ended) for o in outputs.values())
        await target.import_from(source, passed_on(NEIGHBOUR, expected[0]), transport)
        assert (await target.until(NEIGHBOUR)).tokens == expected[1:]
        await source.stub.release_kv(pb.ReleaseKvRequest(request_ids=[NEIGHBOUR]))
        for client in (source, target):
            await client.until_blocks_used(0)
            await client.close()
        print(f"{race.number} races: {race.outcomes}")
        assert "DEADLINE" not in race.outcomes, "it was left waiting"
        assert race.outcomes["arrived"] > 20 and race.outcomes["NOT_HELD"] > 20

    run(test(), 180)
