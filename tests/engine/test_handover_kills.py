"""B.2 #45. kill -9 in the middle of a hand-over, a hundred times each way over each transport: the
survivor lives, its call ends within a second, and it works with the peer's next life."""

import asyncio
import random
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest
from grpclib.exceptions import StreamTerminatedError

from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import LocalReplica, request
from tests.engine.test_worker import run
from tests.engine.workers import Client, ImportFailed, Zygote, up
from tests.tiny import make_tiny

ANSWER_S = 1.0
PROMPT = "All happy families are alike. " * 5
REQUESTS = (1, 2, 3)
"""Moved at once. Their prompt is the same, so the source computes it once."""
BLOCKS = 12
# 128 KiB of KV a token: enough bytes to be hit while they move, little to compute.
WIDE = {"layers": 2, "heads": 8, "kv_heads": 8, "head_dim": 1024, "ffn": 16}
SMALL_STEPS = {"max_batch_tokens": 64, "max_batch_size": 8}
KILLS = pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
TRANSPORTS = pytest.mark.parametrize(
    "transport", [pb.Transport.MAP, pb.Transport.UCX], ids=lambda t: t.name.lower()
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "wide", **WIDE)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    alone = LocalReplica(model, BLOCKS)
    alone.prefill(request(1, PROMPT, 3))
    tokens = alone.until(1)[1].tokens
    alone.close()
    return tokens


class Hunt:
    """Hand-overs that work, and hand-overs under which one side is killed."""

    def __init__(self, transport: pb.Transport, expected: list[int]) -> None:
        self.transport = transport
        self.expected = expected
        self.lease = 0
        self.kills = 0
        self.in_transfer = 0
        self.slowest_s = 0.0
        self.moved = False
        """Whether bytes had arrived at the last kill."""
        self.delay_s = 0.02
        self.rng = random.Random(7)

    def import_(self, source: Client, target: Client, number: int) -> Awaitable[object]:
        passed_on = request(number, PROMPT, 3)
        passed_on.output_tokens = self.expected[:1]
        self.lease += 1
        return target.import_from(source, passed_on, self.transport, lease_id=self.lease)  # type: ignore[no-any-return]

    async def succeed(self, source: Client, target: Client) -> None:
        """To the last token, and to the last block."""
        target.outputs.clear()
        await self.import_(source, target, 1)
        assert (await target.until(1)).tokens == self.expected[1:]
        await target.until_blocks_used(0)

    async def kill(self, victim: Client, source: Client, target: Client) -> list[str]:
        """Kills `victim` under several imports. Returns what those that were pending then
        ended with; they have a second to do so."""
        target.outputs.clear()
        touched = target.process.shared_kib
        calls = [asyncio.ensure_future(self.import_(source, target, n)) for n in REQUESTS]
        await asyncio.sleep(self.rng.uniform(0.5, 1.0) * self.delay_s)
        pending = [call for call in calls if not call.done()]
        self.moved = target.process.shared_kib > touched
        victim.process.kill()
        killed = time.monotonic()
        await asyncio.wait(calls, timeout=5 * ANSWER_S)
        took = time.monotonic() - killed
        assert all(call.done() for call in calls), "an import never ended"
        await victim.process.wait()
        await victim.close()
        errors = [error for call in pending if (error := call.exception())]
        if errors:
            self.kills += 1
            self.slowest_s = max(self.slowest_s, took)
            assert took < ANSWER_S, errors
        return [self.text(error) for error in errors]

    def text(self, error: BaseException) -> str:
        assert isinstance(error, (ImportFailed, StreamTerminatedError, OSError)), error
        return str(error) if isinstance(error, ImportFailed) else ""

    def aim(self, early: bool, late: bool) -> None:
        self.delay_s *= 1.1 if early else 0.9 if late else 1.0

    def print(self) -> None:
        print(
            f"{self.transport.name}: {self.kills} kills under pending imports, "
            f"{self.in_transfer} while bytes moved, slowest end {self.slowest_s * 1e3:.0f} ms"
        )


async def held_source(zygotes: Zygote, model: Path, expected: list[int]) -> Client:
    source = await up(zygotes, "p", model, BLOCKS, replica=SMALL_STEPS)
    for number in REQUESTS:
        await source.prefill(request(number, PROMPT, 3), hold=True)
    for number in REQUESTS:
        assert (await source.until(number)).tokens == expected[:1]
    return source


@KILLS
@TRANSPORTS
@pytest.mark.timeout(900)
def test_the_target_outlives_sources_that_are_killed(
    model: Path, zygotes: Zygote, expected: list[int], transport: pb.Transport, kills: int
) -> None:
    async def test() -> None:
        hunt = Hunt(transport, expected)
        target = await up(zygotes, "d", model, BLOCKS)
        for _ in range(6 * kills):
            source = await held_source(zygotes, model, expected)
            await hunt.succeed(source, target)
            errors = await hunt.kill(source, source, target)
            for error in errors:
                assert error.startswith("SOURCE: ") and f"p/{source.epoch}" in error, error
            moving = [e for e in errors if "waiting for ExportKv's answer" not in e]
            hunt.in_transfer += bool(moving)
            hunt.aim(early=bool(errors) and not moving, late=not errors)
            # Those that came through before the kill go on, like any other.
            await target.until_blocks_used(0)
            assert all(o.tokens == expected[1:] for o in target.outputs.values())
            assert target.process.alive
            if hunt.in_transfer == kills:
                break
        hunt.print()
        assert hunt.in_transfer == kills
        await target.close()

    run(test(), 900)


@KILLS
@TRANSPORTS
@pytest.mark.timeout(900)
def test_the_source_outlives_targets_that_are_killed(
    model: Path, zygotes: Zygote, expected: list[int], transport: pb.Transport, kills: int
) -> None:
    async def test() -> None:
        hunt = Hunt(transport, expected)
        source = await held_source(zygotes, model, expected)
        used = (await source.stub.describe(pb.DescribeRequest())).blocks_used
        for _ in range(6 * kills):
            target = await up(zygotes, "d", model, BLOCKS)
            await hunt.succeed(source, target)
            errors = await hunt.kill(target, source, target)
            hunt.in_transfer += bool(errors) and hunt.moved
            hunt.aim(early=bool(errors) and not hunt.moved, late=not errors)
            told = await source.stub.describe(pb.DescribeRequest(), timeout=ANSWER_S)
            assert told.blocks_used == used, "the source keeps what it holds, and no more"
            if hunt.in_transfer == kills:
                break
        hunt.print()
        assert hunt.in_transfer == kills
        target = await up(zygotes, "d", model, BLOCKS)
        await hunt.succeed(source, target)
        await source.stub.release_kv(pb.ReleaseKvRequest(request_ids=list(REQUESTS)))
        await source.until_blocks_used(0)
        assert source.process.alive
        for client in (source, target):
            await client.close()

    run(test(), 900)
