"""Weights from worker to worker: exact bytes or an error, whoever dies."""

import asyncio
import json
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.layout import read_model_file
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import request
from tests.engine.test_worker import refused, run
from tests.engine.workers import Client, Zygote
from tests.tiny import make_tiny

# 180 MB in 12 layers: long enough to be hit in the middle, cheap to compute.
LARGE = {"layers": 12, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 4352}
BLOCKS = 4
PROMPT = "Call me Ishmael."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "large", **LARGE)


class Load:
    """A LoadModel under way."""

    def __init__(self, client: Client, model: Path, *peers: Client, floor_ms: int = 0) -> None:
        self.client = client
        self.progress: list[pb.LoadProgress] = []
        self.told_s: list[float] = []
        """When, since this load was asked for."""
        self.moved = asyncio.Condition()
        self.call = pb.LoadModelRequest(
            model_path=str(model),
            blocks_total=BLOCKS,
            peers=[
                pb.WeightPeer(replica_id=p.replica, epoch=p.epoch, endpoint=str(p.process.socket))
                for p in peers
            ],
            floor_ms=floor_ms,
        )
        self.task = asyncio.create_task(self._run())
        # Its end is looked at where it matters.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _run(self) -> pb.LoadProgress:
        began = time.monotonic()
        async for progress in self.client.stub.load_model(self.call):
            async with self.moved:
                self.told_s.append(time.monotonic() - began)
                self.progress.append(progress)
                self.moved.notify_all()
        return self.progress[-1]

    async def until_layers(self, layers: int) -> None:
        async with asyncio.timeout(20), self.moved:
            await self.moved.wait_for(
                lambda: self.progress and self.progress[-1].layers_ready >= layers
            )

    async def end(self) -> pb.LoadProgress:
        async with asyncio.timeout(20):
            return await self.task


@asynccontextmanager
async def workers(zygotes: Zygote, *names: str) -> AsyncIterator[list[Client]]:
    clients = []
    try:
        for name in names:
            process = zygotes.start(name)
            clients.append(await Client.connect(name, zygotes.epochs[name], process))
        yield clients
    finally:
        for client in clients:
            await client.close()
            client.process.kill()
            await client.process.wait()


def said(zygotes: Zygote, client: Client, event: str) -> list[dict[str, Any]]:
    lines = (zygotes.directory / f"{client.replica}.log").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    identity = f"{client.replica}/{client.epoch}"
    return [r for r in records if r["event"] == event and r["worker"] == identity]


async def tokens(client: Client) -> list[int]:
    await client.watch()
    await client.prefill(request(1, PROMPT, 6, ignore_eos=True))
    return (await client.until(1)).tokens


def chain(hollow: Path, source: Client, *targets: Client) -> list[Load]:
    """Each asks the one before it, and those before that when it fails."""
    return [
        Load(target, hollow, *reversed((source, *targets[:index])))
        for index, target in enumerate(targets)
    ]


def test_a_chain_of_workers_without_weights_computes_what_the_source_does(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "a", "b", "c") as (source, *targets):
            await Load(source, model).end()
            loads = chain(hollow, source, *targets)
            ends = [await load.end() for load in loads]
            file = read_model_file(model)
            assert {end.digest for end in ends} == {file.config.digest}
            for load, feeder in zip(loads, ("s", "a", "b"), strict=True):
                ready = [p.layers_ready for p in load.progress]
                assert ready == sorted(ready) and ready[-1] == LARGE["layers"]
                assert {p.source for p in load.progress} == {feeder}
            expected = await tokens(source)
            assert len(expected) == 6
            for target in targets:
                assert await tokens(target) == expected

    run(talk())


def test_a_floor_under_a_load_is_spread_over_its_layers(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "a") as (source, target):
            await Load(source, model).end()
            load = Load(target, hollow, source, floor_ms=500)
            await load.end()
            shares = [p.bytes_loaded / p.bytes_total for p in load.progress]
            assert len(shares) > LARGE["layers"] and shares[-1] == 1
            for told_s, share in zip(load.told_s, shares, strict=True):
                assert told_s >= 0.5 * share - 0.01

    run(talk())


def test_a_successor_may_ask_before_its_source_has_begun(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "a", "b") as (source, middle, last):
            await Load(source, model).end()
            early = Load(last, hollow, middle)
            await asyncio.sleep(0.3)
            await Load(middle, hollow, source).end()
            assert (await early.end()).source == "a"

    run(talk())


@pytest.mark.parametrize("layers", [0, 3, 7])
def test_the_death_of_a_middle_heals_the_chain_without_sending_anything_twice(
    zygotes, model, hollow, layers
):
    async def kill_it() -> bool:
        """False when it came too late to hit the transfer."""
        async with workers(zygotes, "s", "a", "b", "c") as (source, *targets):
            await Load(source, model).end()
            first, second, third = chain(hollow, source, *targets)
            await second.until_layers(layers)
            targets[0].process.kill()
            killed = time.monotonic()
            ends = [await second.end(), await third.end()]
            took_s = time.monotonic() - killed
            [healed] = said(zygotes, targets[1], "weights received")
            if str_of(source) not in healed["taken"]:
                return False
            print(f"healed and whole {took_s:.2f} s after the kill")
            await asyncio.wait([first.task], timeout=5)
            size = read_model_file(model).layout.length
            assert sum(healed["taken"].values()) == size == healed["bytes"], healed
            assert set(healed["taken"]) <= {str_of(targets[0]), str_of(source)}
            [undisturbed] = said(zygotes, targets[2], "weights received")
            assert undisturbed["taken"] == {str_of(targets[1]): size}
            assert [end.source for end in ends] == ["s", "b"]
            expected = await tokens(source)
            assert await tokens(targets[1]) == await tokens(targets[2]) == expected
            return True

    async def until_hit() -> None:
        while not await kill_it():
            pass

    run(until_hit())


def str_of(client: Client) -> str:
    return f"{client.replica}/{client.epoch}"


def test_the_death_of_the_source_fails_the_chain_and_the_next_load_goes_on(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "x", "a", "b") as (source, other, *targets):
            await Load(source, model).end()
            first, second = chain(hollow, source, *targets)
            await second.until_layers(4)
            source.process.kill()
            killed = time.monotonic()
            for load in (first, second):
                error = await refused(load.end())
                assert error.status is Status.UNAVAILABLE
                assert str_of(source) in str(error.message)
            took = time.monotonic() - killed
            assert took < 3.0, f"{took:.2f} s to give up"
            await Load(other, model).end()
            size = read_model_file(model).layout.length
            for load, target in zip(chain(hollow, other, *targets), targets, strict=True):
                assert (await load.end()).layers_ready == LARGE["layers"]
                [loaded] = said(zygotes, target, "weights received")
                assert loaded["resumed_at"] > 0
                assert sum(loaded["taken"].values()) == size - loaded["resumed_at"]
            assert await tokens(targets[0]) == await tokens(targets[1]) == await tokens(other)

    run(talk())


def test_the_death_of_the_last_disturbs_nobody(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "a", "b") as (source, *targets):
            await Load(source, model).end()
            first, second = chain(hollow, source, *targets)
            await second.until_layers(2)
            targets[1].process.kill()
            assert (await first.end()).source == "s"
            with pytest.raises(StreamTerminatedError):
                await second.end()
            [loaded] = said(zygotes, targets[0], "weights received")
            assert list(loaded["taken"]) == [str_of(source)]
            assert await tokens(targets[0]) == await tokens(source)

    run(talk())


def test_a_middle_that_stands_still_is_noticed_within_a_second(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "a", "b") as (source, *targets):
            await Load(source, model).end()
            _, second = chain(hollow, source, *targets)
            await second.until_layers(3)
            targets[0].process.kill(signal.SIGSTOP)
            stopped = time.monotonic()
            await second.end()
            print(f"whole {time.monotonic() - stopped:.2f} s after the stop")
            [warning] = said(zygotes, targets[1], "weights stopped coming")
            assert "no sign of life" in warning["error"]
            silent_s = float(warning["error"].split("for ")[1].split(" s")[0])
            assert silent_s < 1.0
            assert await tokens(targets[1]) == await tokens(source)

    run(talk())


def test_damaged_weights_are_never_ready_and_a_sound_peer_makes_up_for_them(
    zygotes, model, hollow, tmp_path
):
    """A file that changes under its mapping: the source has checked it and cannot know."""
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    layer = read_model_file(model).layout.sections[6]

    async def talk() -> None:
        async with workers(zygotes, "d", "s", "a", "b", "c") as (bad, good, *targets):
            await Load(bad, damaged).end()
            await Load(good, model).end()
            with (damaged / "arena.bin").open("r+b") as handle:
                handle.seek(layer.offset + 4321)
                byte = handle.read(1)
                handle.seek(layer.offset + 4321)
                handle.write(bytes([byte[0] ^ 1]))
            error = await refused(Load(targets[0], hollow, bad).end())
            assert error.status is Status.DATA_LOSS
            assert layer.name in str(error.message)
            told = await targets[0].stub.describe(pb.DescribeRequest())
            assert told.model_digest == ""
            loads = [
                Load(targets[1], hollow, bad, good),
                Load(targets[2], hollow, targets[1], bad, good),
            ]
            assert (await loads[0].end()).source == "s"
            # Either it was damaged here too, or its source had the sound bytes by then.
            assert (await loads[1].end()).source in ("b", "s")
            expected = await tokens(good)
            assert await tokens(targets[1]) == await tokens(targets[2]) == expected

    run(talk())


def test_a_load_that_nobody_waits_for_any_more_ends(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "a", "b") as (source, *targets):
            await Load(source, model).end()
            first, second = chain(hollow, source, *targets)
            await second.until_layers(2)
            first.task.cancel()
            # The chain heals around it as around a dead one.
            assert (await second.end()).source == "s"
            async with asyncio.timeout(5):
                while not said(zygotes, source, "weights were not sent"):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            told = await targets[0].stub.describe(pb.DescribeRequest())
            assert (told.model_digest, told.layers_ready) == ("", 0)
            again = await Load(targets[0], hollow, targets[1]).end()
            assert again.source == "b"

    run(talk())


def test_a_source_that_gives_its_weights_up_stops_sending_first(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "x", "a") as (source, other, target):
            await Load(source, model).end()
            await Load(other, model).end()
            load = Load(target, hollow, source, other)
            await load.until_layers(2)
            await source.stub.reset(pb.ResetRequest(unload_weights=True), timeout=5)
            assert (await load.end()).source == "x"
            assert await tokens(target) == await tokens(other)
            await target.stub.reset(pb.ResetRequest(unload_weights=True), timeout=5)
            refusal = await refused(Load(target, hollow, source).end())
            assert f"{str_of(source)} has no weights" in str(refusal.message)

    run(talk())


def test_what_does_not_fit_is_refused_by_name(zygotes, model, hollow, tmp_path):
    other_model = make_tiny(tmp_path / "other", seed=1)

    async def talk() -> None:
        async with workers(zygotes, "s", "a") as (source, target):
            await Load(source, model).end()
            error = await refused(Load(target, hollow).end())
            assert error.status is Status.INVALID_ARGUMENT
            assert "arena.bin" in str(error.message)
            nameless = pb.LoadModelRequest(
                model_path=str(hollow), blocks_total=4, peers=[pb.WeightPeer(replica_id="s")]
            )
            with pytest.raises(GRPCError, match=r"peers\[0\]\.endpoint: empty"):
                _ = [step async for step in target.stub.load_model(nameless)]
            error = await refused(Load(target, other_model, source).end())
            assert "model_digest" in str(error.message)
            call = pb.ServeWeightsRequest(source_epoch=source.epoch + 1, model_digest="x")
            error = await refused(source.stub.serve_weights(call, timeout=5))
            assert error.status is Status.FAILED_PRECONDITION
            assert "source_epoch" in str(error.message)
            digest = read_model_file(model).config.digest
            call = pb.ServeWeightsRequest(
                source_epoch=source.epoch, model_digest=digest, offset=1 << 40
            )
            error = await refused(source.stub.serve_weights(call, timeout=5))
            assert error.status is Status.INVALID_ARGUMENT
            # And none of it was in the way of what does fit.
            assert (await Load(target, hollow, source).end()).source == "s"

    run(talk())
