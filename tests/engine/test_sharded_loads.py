"""Shards: each worker of a node brings a range over the network, the rest is gathered there."""

import asyncio
import shutil
from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from blitzd.engine.coverage import shards
from blitzd.engine.layout import ALIGNMENT, read_model_file
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.test_weight_transfers import BLOCKS, Load, said, str_of, tokens, workers
from tests.engine.test_worker import refused, run
from tests.engine.workers import Client
from tests.tiny import make_tiny

# 83 MB in 12 layers: long enough to be hit in the middle, for five at a time on few cores.
WEIGHTS = {"layers": 12, "hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 4352}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "wide", **WEIGHTS)


class ShardedLoad(Load):
    def __init__(
        self,
        client: Client,
        model: Path,
        takers: list[Client],
        *peers: Client,
        transport: pb.Transport = pb.Transport.MAP,
    ) -> None:
        super().__init__(client, model, *peers)
        self.call.chunk_bytes = 192 << 10
        # The call begins with the loop's next turn.
        self.call.shards = [
            pb.WeightPeer(
                replica_id=t.replica,
                epoch=t.epoch,
                endpoint=str(t.process.socket),
                transport=transport,
            )
            for t in takers
        ]


def sizes(model: Path, count: int) -> list[int]:
    cut = shards(read_model_file(model).layout.length, count, ALIGNMENT)
    return [end - start for start, end in cut]


@pytest.mark.parametrize(
    "transport",
    [pb.Transport.MAP, pytest.param(pb.Transport.UCX, marks=pytest.mark.slow)],
)
def test_each_byte_comes_once_from_a_source_and_the_rest_from_the_neighbour(
    zygotes, model, hollow, transport
):
    """Two machines of two workers, in two chains, and one that only gathers."""

    async def talk() -> None:
        names = ("s0", "s1", "a0", "a1", "b0", "b1", "b2")
        async with workers(zygotes, *names) as (s0, s1, a0, a1, b0, b1, b2):
            await asyncio.gather(Load(s0, model).end(), Load(s1, model).end())
            near, far = [a0, a1], [b0, b1]
            loads = [
                ShardedLoad(a0, hollow, near, s0, transport=transport),
                ShardedLoad(a1, hollow, near, s1, transport=transport),
                ShardedLoad(b0, hollow, far, a0, s0, transport=transport),
                ShardedLoad(b1, hollow, far, a1, s1, transport=transport),
                ShardedLoad(b2, hollow, far, b0, b1, transport=transport),
            ]
            ends = await asyncio.gather(*(load.end() for load in loads))
            assert {end.digest for end in ends} == {read_model_file(model).config.digest}
            assert [end.source for end in ends[:4]] == ["s0", "s1", "a0", "a1"]
            first, second = sizes(model, 2)
            for client, taken in {
                a0: {str_of(s0): first, str_of(a1): second},
                a1: {str_of(s1): second, str_of(a0): first},
                b0: {str_of(a0): first, str_of(b1): second},
                b1: {str_of(a1): second, str_of(b0): first},
                b2: {str_of(b0): first, str_of(b1): second},
            }.items():
                [loaded] = said(zygotes, client, "weights received")
                assert loaded["taken"] == taken
            for load in loads:
                ready = [p.layers_ready for p in load.progress]
                assert ready == sorted(ready) and ready[-1] == WEIGHTS["layers"]
            expected = await tokens(s0)
            for client in (*near, *far, b2):
                assert await tokens(client) == expected

    run(talk(), 60)


@pytest.mark.parametrize("layers", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_death_of_a_shards_source_is_made_up_for_by_the_next(zygotes, model, hollow, layers):
    async def kill_it() -> bool:
        """False when it came too late to hit the transfer."""
        async with workers(zygotes, "s0", "s1", "x", "a", "b") as (s0, s1, other, a, b):
            await asyncio.gather(*(Load(client, model).end() for client in (s0, s1, other)))
            loads = [
                ShardedLoad(a, hollow, [a, b], s0, other),
                ShardedLoad(b, hollow, [a, b], s1, other),
            ]
            await loads[0].until_layers(layers)
            s1.process.kill()
            ends = await asyncio.gather(*(load.end() for load in loads))
            [loaded] = said(zygotes, b, "weights received")
            if str_of(other) not in loaded["taken"]:
                return False
            assert ends[1].source == "x"
            assert sum(loaded["taken"].values()) == loaded["bytes"]
            assert await tokens(a) == await tokens(b) == await tokens(other)
            return True

    async def until_hit() -> None:
        while not await kill_it():
            pass

    run(until_hit(), 60)


@pytest.mark.slow
def test_without_any_source_left_for_a_shard_it_comes_the_neighbours_way(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s0", "s1", "a", "b") as (s0, s1, a, b):
            await Load(s0, model).end()
            # s1 has no weights, and never will.
            loads = [ShardedLoad(a, hollow, [a, b], s0), ShardedLoad(b, hollow, [a, b], s1)]
            await asyncio.gather(*(load.end() for load in loads))
            size = read_model_file(model).layout.length
            [whole] = said(zygotes, a, "weights received")
            assert whole["taken"] == {str_of(s0): size}
            [gathered] = said(zygotes, b, "weights received")
            assert gathered["taken"][str_of(a)] == size
            assert await tokens(a) == await tokens(b) == await tokens(s0)

    run(talk(), 60)


@pytest.mark.slow
def test_the_death_of_a_neighbour_leaves_its_shard_to_the_own_peers(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s0", "s1", "a", "b") as (s0, s1, a, b):
            await asyncio.gather(Load(s0, model).end(), Load(s1, model).end())
            load = ShardedLoad(a, hollow, [a, b], s0)
            ShardedLoad(b, hollow, [a, b], s1)
            await load.until_layers(1)
            b.process.kill()
            await load.end()
            [loaded] = said(zygotes, a, "weights received")
            assert sum(loaded["taken"].values()) == loaded["bytes"]
            assert await tokens(a) == await tokens(s0)

    run(talk(), 60)


def test_a_damaged_section_of_two_shards_is_made_up_for(zygotes, model, hollow, tmp_path):
    """The cut goes through a layer: neither who brought it can be known to be at fault."""
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    layout = read_model_file(model).layout
    cut = shards(layout.length, 2, ALIGNMENT)[1][0]
    [section] = [s for s in layout.sections if s.offset < cut < s.offset + s.length]

    async def talk() -> None:
        async with workers(zygotes, "d", "s1", "a", "b") as (bad, good, a, b):
            await asyncio.gather(Load(bad, damaged).end(), Load(good, model).end())
            with (damaged / "arena.bin").open("r+b") as handle:
                handle.seek(section.offset)
                byte = handle.read(1)
                handle.seek(section.offset)
                handle.write(bytes([byte[0] ^ 1]))
            loads = [
                ShardedLoad(a, hollow, [a, b], bad, good),
                ShardedLoad(b, hollow, [a, b], good),
            ]
            await asyncio.gather(*(load.end() for load in loads))
            assert said(zygotes, a, "damaged weights")
            assert await tokens(a) == await tokens(b) == await tokens(good)

    run(talk(), 60)


@pytest.mark.slow
def test_a_sharded_load_that_is_cancelled_ends_and_the_next_goes_on(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s0", "s1", "a", "b") as (s0, s1, a, b):
            await asyncio.gather(Load(s0, model).end(), Load(s1, model).end())
            first = ShardedLoad(a, hollow, [a, b], s0)
            second = ShardedLoad(b, hollow, [a, b], s1)
            await second.until_layers(1)
            first.task.cancel()
            await second.end()
            told = await a.stub.describe(pb.DescribeRequest())
            assert (told.model_digest, told.layers_ready) == ("", 0)
            await ShardedLoad(a, hollow, [a, b], s0).end()
            assert await tokens(a) == await tokens(b) == await tokens(s0)

    run(talk(), 60)


def test_what_makes_no_sense_is_refused_by_name(zygotes, hollow):
    async def talk() -> None:
        async with workers(zygotes, "s", "a") as (source, a):
            error = await refused(ShardedLoad(a, hollow, [a, source]).end())
            assert error.status is Status.INVALID_ARGUMENT
            assert "peers: none" in str(error.message)
            live = ShardedLoad(a, hollow, [a], source)
            live.call.live = True
            assert "live: " in str((await refused(live.end())).message)
            nameless = pb.LoadModelRequest(
                model_path=str(hollow),
                blocks_total=BLOCKS,
                peers=[pb.WeightPeer(replica_id="s", endpoint="x")],
                shards=[pb.WeightPeer(replica_id="a")],
            )
            with pytest.raises(GRPCError, match=r"shards\[0\]\.endpoint: empty"):
                _ = [step async for step in a.stub.load_model(nameless)]

    run(talk())
