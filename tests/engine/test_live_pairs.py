"""Real workers: one computes while its weights arrive, its pair goes on with what it has begun,
and a third decodes from the KV of both. The test is the source of the weights, so a layer arrives
when it says so."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpclib.exceptions import GRPCError
from grpclib.server import Server

from blitzd.engine.layout import read_model_file
from blitzd.engine.relay import ACK_S
from blitzd.engine.weights_serve import Offer, WeightServer
from blitzd.fabric import Identity, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import LocalReplica, request
from tests.engine.test_worker import run
from tests.engine.workers import ANSWER_S, Client, Zygote, imported, up
from tests.tiny import make_tiny

# Layers of 2 MB: weights are sent by the MiB, so each can be held back.
SHAPE = {"layers": 5, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 512}
LAYERS = SHAPE["layers"]
LENGTH = 10
PROMPTS = {n: f"{n} requests and one token " * (1 + n % 4) for n in range(1, 9)}
F = pb.HandoverFault
TRANSPORTS = pytest.mark.parametrize(
    "transport", [pb.Transport.MAP, pb.Transport.UCX], ids=lambda t: t.name.lower()
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", "float64", **SHAPE)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    alone = LocalReplica(model)
    for number, prompt in PROMPTS.items():
        alone.prefill(request(number, prompt, LENGTH, ignore_eos=True))
    found = {n: out.tokens for n, out in alone.until(*PROMPTS).items()}
    alone.close()
    return found


class Gate(pb.EngineBase):
    """A worker with the weights that lets so many layers go."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.path = directory / f"gate-{time.monotonic_ns()}.sock"
        self._layout = read_model_file(model).layout
        self._digest = read_model_file(model).config.digest
        self._bytes = bytearray((model / "arena.bin").read_bytes())
        self._allowed = 0
        self._ucx = UcxFabric("gate/1")
        self._weights = WeightServer(Identity("gate", 1), self._ucx)
        self._server = Server([self])

    def allow(self, layers: int) -> None:
        section = self._layout.sections[layers]
        self._allowed = min(section.offset + section.length + (1 << 20), len(self._bytes))
        if layers >= self._layout.layers:
            self._allowed = len(self._bytes)

    async def __aenter__(self) -> "Gate":
        size = len(self._bytes)
        await self._weights.offer(Offer(self._digest, self._bytes, size, lambda _: self._allowed))
        await self._server.start(path=str(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._weights.withdraw()
        await self._ucx.close()

    async def serve_weights(self, message: pb.ServeWeightsRequest) -> pb.ServeWeightsReply:
        return await self._weights.run(message, time.monotonic() + ANSWER_S)


class New:
    """A live load under way."""

    def __init__(self, client: Client, gate: Gate, hollow: Path) -> None:
        self.client = client
        self.gate = gate
        self.layers = -1
        self._moved = asyncio.Condition()
        call = pb.LoadModelRequest(
            model_path=str(hollow),
            blocks_total=64,
            peers=[pb.WeightPeer(replica_id="gate", epoch=1, endpoint=str(gate.path))],
            live=True,
        )
        self.loading = asyncio.create_task(self._load(call))

    async def _load(self, call: pb.LoadModelRequest) -> None:
        async for progress in self.client.stub.load_model(call):
            async with self._moved:
                self.layers = progress.layers_ready
                self._moved.notify_all()

    async def until(self, layers: int) -> None:
        self.gate.allow(layers)
        async with asyncio.timeout(ANSWER_S), self._moved:
            await self._moved.wait_for(lambda: self.layers >= layers)

    async def prefill(self, number: int, **changes: Any) -> None:
        one = request(number, PROMPTS[number], changes.pop("max_tokens", LENGTH), ignore_eos=True)
        await self.client.prefill(one, hold=True)


@contextlib.asynccontextmanager
async def world(
    zygotes: Zygote, model: Path, hollow: Path, **options: Any
) -> AsyncIterator[tuple[New, Client]]:
    """New at layer 0 of its load, and Old."""
    old = await up(zygotes, "old", model, 40, **options)
    process = zygotes.start("new", **options)
    client = await Client.connect("new", zygotes.epochs["new"], process)
    async with Gate(model, zygotes.directory) as gate:
        new = New(client, gate, hollow)
        try:
            await new.until(0)
            await client.watch()
            yield new, old
        finally:
            new.loading.cancel()
            await asyncio.gather(new.loading, return_exceptions=True)
            for one in (client, old):
                await one.close()
                one.process.kill()
                await one.process.wait()


def follow(old: Client, new: Client, transport: pb.Transport) -> "asyncio.Task[pb.FollowLiveReply]":
    call = pb.FollowLiveRequest(
        source_replica=new.replica,
        source_epoch=new.epoch,
        source_endpoint=str(new.process.socket),
        transport=transport,
    )
    return asyncio.create_task(old.stub.follow_live(call, timeout=ANSWER_S))


async def stopped(following: "asyncio.Task[pb.FollowLiveReply]") -> None:
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def first_token(number: int, *clients: Client) -> Client:
    """Who made it."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            for client in clients:
                if number in client.outputs and client.outputs[number].ended:
                    return client
            await asyncio.sleep(0.005)


async def decoded(
    target: Client,
    number: int,
    new: Client,
    made_by: Client,
    transport: pb.Transport,
    one: pb.Request | None = None,
) -> list[int]:
    """All tokens: the first, and those of the target, with the KV of both under one lease."""
    call = pb.ImportKvRequest(
        request=one or request(number, PROMPTS[number], LENGTH, ignore_eos=True),
        lease_id=number,
        source_replica=made_by.replica,
        source_epoch=made_by.epoch,
        source_endpoint=str(made_by.process.socket),
        transport=transport,
    )
    assert call.request is not None
    call.request.output_tokens = list(made_by.outputs[number].tokens)
    split = made_by.relayed.get(number, 0) if made_by is not new else 0
    if split:
        call.source_replica, call.source_epoch = new.replica, new.epoch
        call.source_endpoint = str(new.process.socket)
        call.rest = pb.KvSource(
            replica_id=made_by.replica,
            epoch=made_by.epoch,
            endpoint=str(made_by.process.socket),
        )
        call.split_layer = split
    await imported(target.stub, call)
    return [*call.request.output_tokens, *(await target.until(number)).tokens]


async def emptied(*clients: Client) -> None:
    for client in clients:
        held = (await client.holdings()).request_ids
        await client.stub.release_kv(pb.ReleaseKvRequest(request_ids=held), timeout=ANSWER_S)
        await client.until_blocks_used(0)
        found = await client.holdings()
        assert not found.request_ids and not found.exports and not found.transfers


@TRANSPORTS
def test_every_split_decodes_to_the_tokens_of_one_worker(
    zygotes: Zygote, model: Path, hollow: Path, expected: dict[int, list[int]],
    transport: pb.Transport,
) -> None:  # fmt: skip
    async def test() -> None:
        target = await up(zygotes, "target", model, 30, verify_kv=True)
        async with world(zygotes, model, hollow) as (new, old):
            for split in range(LAYERS):
                number = split + 1
                await new.until(split)
                await new.prefill(number)
                await asyncio.sleep(0.2)  # New comes to its watermark
                following = follow(old, new.client, transport)
                made_by = await first_token(number, new.client, old)
                assert made_by is old
                assert old.relayed.get(number, 0) == split
                found = await decoded(target, number, new.client, old, transport)
                assert found == expected[number]
                await stopped(following)
            await new.until(LAYERS)
            await new.loading
            assert new.client.relayed == {split + 1: split for split in range(LAYERS)}
            await new.prefill(6)
            assert await first_token(6, new.client) is new.client
            found = await decoded(target, 6, new.client, new.client, transport)
            assert found == expected[6]
            reply = await follow(old, new.client, transport)
            assert (reply.taken, reply.fault) == (0, F.NONE), "drained at once"
            await emptied(new.client, old, target)
        await target.close()

    run(test())


@pytest.mark.parametrize(
    ("transport", "policy"),
    [
        (pb.Transport.MAP, "ilp_free"),
        (pb.Transport.UCX, "ilp_free"),
        (pb.Transport.MAP, "ilp"),
        (pb.Transport.MAP, "best_effort"),
    ],
)
def test_requests_and_layers_arrive_at_random(
    zygotes: Zygote, model: Path, hollow: Path, expected: dict[int, list[int]],
    transport: pb.Transport, policy: str,
) -> None:  # fmt: skip
    """Both work at once, 4 ms a layer; some requests end at New, some at Old."""

    async def test() -> None:
        replica = {"pace_layer_ms": 4.0, "live_policy": policy}
        options: dict[str, Any] = {"replica": replica}
        target = await up(zygotes, "target", model, 40, verify_kv=True)
        async with world(zygotes, model, hollow, **options) as (new, old):
            following = follow(old, new.client, transport)
            for number in PROMPTS:
                await new.prefill(number)
                if number <= LAYERS:
                    await new.until(number)
                await asyncio.sleep(0.012 if number % 2 else 0)
            await new.loading
            makers = [await first_token(n, new.client, old) for n in PROMPTS]
            reply = await following
            assert reply.fault is F.NONE
            assert reply.taken == makers.count(old)
            for number, made_by in zip(PROMPTS, makers, strict=True):
                found = await decoded(target, number, new.client, made_by, transport)
                assert found == expected[number]
            await emptied(new.client, old, target)
        await target.close()

    run(test())


def test_what_old_does_not_acknowledge_goes_on_at_new(
    zygotes: Zygote, model: Path, hollow: Path, expected: dict[int, list[int]]
) -> None:
    async def test() -> None:
        async with world(zygotes, model, hollow) as (new, old):
            await new.until(2)
            await new.prefill(1)
            await asyncio.sleep(0.1)
            layout = await layout_of(old, new.client)
            call = pb.TakeRelayRequest(
                source_epoch=new.client.epoch,
                layout=layout,
                transport=pb.Transport.MAP,
                wait_ms=1000,
            )
            there = await new.client.stub.take_relay(call, timeout=ANSWER_S)
            assert there.request is not None and there.layers_done == 2
            refused = await new.client.stub.take_relay(call, timeout=ANSWER_S)
            assert refused.fault is F.NOT_HELD, "one at a time"
            began = time.monotonic()
            await new.until(LAYERS)
            assert await first_token(1, new.client) is new.client
            assert time.monotonic() - began > ACK_S - 1
            assert new.client.outputs[1].tokens == expected[1][:1]
            late = pb.AckRelayRequest(source_epoch=new.client.epoch, request_id=1)
            assert not (await new.client.stub.ack_relay(late, timeout=ANSWER_S)).granted
            await emptied(new.client, old)

    run(test())


async def layout_of(old: Client, new: Client) -> str:
    """A refusal names what would be accepted."""
    wrong = pb.TakeRelayRequest(source_epoch=new.epoch, layout="x", transport=pb.Transport.MAP)
    reply = await new.stub.take_relay(wrong, timeout=ANSWER_S)
    assert reply.fault is F.MISMATCH
    other = pb.TakeRelayRequest(source_epoch=new.epoch + 1, transport=pb.Transport.MAP)
    assert (await new.stub.take_relay(other, timeout=ANSWER_S)).fault is F.EPOCH
    return reply.reason.rsplit(" ", 1)[1]


def test_a_reset_ends_the_pair_at_old(zygotes: Zygote, model: Path, hollow: Path) -> None:
    async def test() -> None:
        async with world(zygotes, model, hollow) as (new, old):
            await new.until(1)
            following = follow(old, new.client, pb.Transport.MAP)
            await asyncio.sleep(0.1)
            await old.stub.reset(pb.ResetRequest(unload_weights=True), timeout=ANSWER_S)
            reply = await following
            assert (reply.fault, reply.reason) == (F.CANCELLED, "this worker was reset")
            await new.prefill(1)
            await new.until(LAYERS)
            assert await first_token(1, new.client) is new.client
            await emptied(new.client)

    run(test())


def test_new_dies_while_old_waits_and_old_is_as_before(
    zygotes: Zygote, model: Path, hollow: Path
) -> None:
    async def test() -> None:
        async with world(zygotes, model, hollow) as (new, old):
            await new.until(1)
            following = follow(old, new.client, pb.Transport.MAP)
            await asyncio.sleep(0.1)
            new.client.process.kill()
            reply = await following
            assert reply.fault is F.SOURCE and "new/" in reply.reason
            await emptied(old)
            one = request(1, PROMPTS[1], 2)
            await old.prefill(one)
            assert (await old.until(1)).tokens

    run(test())


def test_cancelled_requests_leave_new_and_a_load_that_ends_takes_all(
    zygotes: Zygote, model: Path, hollow: Path
) -> None:
    async def test() -> None:
        async with world(zygotes, model, hollow) as (new, old):
            await new.until(2)
            for number in (1, 2, 3):
                await new.prefill(number)
            cancel = pb.CancelRequest(request_ids=[1, 3])
            assert (await new.client.stub.cancel(cancel, timeout=ANSWER_S)).cancelled == 2
            assert (await new.client.holdings()).request_ids == [2]
            new.loading.cancel()
            await asyncio.gather(new.loading, return_exceptions=True)
            async with asyncio.timeout(ANSWER_S):
                while (await new.client.holdings_or_none()) is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            with pytest.raises(GRPCError, match="no model is loaded"):
                await new.prefill(4)
            await emptied(old)

    run(test())


def test_a_live_load_needs_peers(zygotes: Zygote, model: Path) -> None:
    async def test() -> None:
        process = zygotes.start("new")
        client = await Client.connect("new", zygotes.epochs["new"], process)
        call = pb.LoadModelRequest(model_path=str(model), blocks_total=8, live=True)
        with pytest.raises(GRPCError, match="live: only with peers, and on a CPU"):
            _ = [progress async for progress in client.stub.load_model(call)]
        await client.close()

    run(test())
