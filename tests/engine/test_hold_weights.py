"""A worker that only keeps the weights, for others: no model runs there, and its peers get all
of it from there, until it is told to let go."""

from pathlib import Path

from grpclib.const import Status

from blitzd.engine.layout import read_model_file
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.test_weight_transfers import Load, chain, tokens, workers
from tests.engine.test_worker import refused, run
from tests.engine.workers import Client
from tests.tiny import make_tiny


async def hold(client: Client, model: Path) -> pb.HoldWeightsReply:
    return await client.stub.hold_weights(pb.HoldWeightsRequest(model_path=str(model)), timeout=10)


def test_peers_load_in_a_chain_from_one_that_holds_and_it_lets_go(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "k", "a", "b") as (keeper, *targets):
            held = await hold(keeper, model)
            file = read_model_file(model)
            assert (held.model_digest, held.bytes_total) == (
                file.config.digest,
                (model / "arena.bin").stat().st_size,
            )
            assert (await hold(keeper, model)).bytes_total == held.bytes_total
            described = await keeper.stub.describe(pb.DescribeRequest())
            assert described.model_digest == "" and described.blocks_total == 0
            ends = [await load.end() for load in chain(hollow, keeper, *targets)]
            assert {end.digest for end in ends} == {file.config.digest}
            assert await tokens(targets[0]) == await tokens(targets[1])
            await keeper.stub.reset(pb.ResetRequest(unload_weights=True), timeout=5)
            await targets[1].stub.reset(pb.ResetRequest(unload_weights=True), timeout=5)
            refusal = await refused(Load(targets[1], hollow, keeper).end())
            assert "has no weights" in str(refusal.message)

    run(talk())


def test_one_that_holds_loads_for_itself_and_goes_on_to_give(zygotes, model, hollow):
    async def talk() -> None:
        async with workers(zygotes, "k", "a") as (keeper, target):
            await hold(keeper, model)
            await Load(keeper, model).end()
            assert (await Load(target, hollow, keeper).end()).source == "k"
            assert await tokens(keeper) == await tokens(target)
            error = await refused(hold(keeper, model))
            assert error.status is Status.FAILED_PRECONDITION

    run(talk())


def test_what_cannot_be_held_is_refused_by_name(zygotes, model, hollow, tmp_path):
    async def talk() -> None:
        async with workers(zygotes, "k") as (keeper,):
            error = await refused(hold(keeper, hollow))
            assert "arena.bin" in str(error.message)
            damaged = make_tiny(tmp_path / "damaged")
            with (damaged / "arena.bin").open("r+b") as handle:
                handle.seek(100)
                handle.write(b"\x55")
            assert "digest" in str((await refused(hold(keeper, damaged))).message)

    run(talk())
