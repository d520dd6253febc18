"""The calls of a live pair: what goes out to the workers, and what the core hears of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.node.config import NodeConfig
from blitzd.node.face import GenerateRequest
from blitzd.node.live import LiveRequest
from blitzd.node.wire_ids import wire_id
from blitzd.node.worker import Home
from blitzd.node.worker_calls import WorkerCalls
from blitzd.node.workers import WorkerPool
from blitzd.proto.blitzd.engine import v1 as pb
from tests.node.driven import World, run
from tests.node.pools import Kept, nothing


class Stub:
    """A worker's side of the calls."""

    def __init__(self, answer: object = None) -> None:
        self.asked: list[Any] = []
        self._answer = answer

    async def follow_live(self, call: pb.FollowLiveRequest, timeout: float) -> object:
        self.asked.append(call)
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    async def import_kv(
        self, call: pb.ImportKvRequest, timeout: float
    ) -> AsyncIterator[pb.ImportKvReport]:
        self.asked.append(call)
        yield pb.ImportKvReport(ended=True, bytes_moved=7)

    async def load_model(self, call: pb.LoadModelRequest) -> AsyncIterator[pb.LoadProgress]:
        self.asked.append(call)
        yield pb.LoadProgress(layers_total=4, block_tokens=64, blocks_total=9)
        yield pb.LoadProgress(layers_ready=4, layers_total=4, digest="d")


class Pool:
    """r0, r1 and r2 on this node, none of them a process, and r1's calls are heard."""

    def __init__(self, directory: Path, answer: object = None, afar: str = "") -> None:
        self.kept, self.stub = Kept(), Stub(answer)
        config = NodeConfig(directory, directory / "model", "tiny", kv_blocks=9)
        self.pool = WorkerPool(config, directory / "run", self.kept)
        for name in ("r0", "r1", "r2"):
            worker = self.pool._enlist(name, 1)
            worker.watched.set()
            if name == afar:
                worker.home, worker.endpoint = Home("far", "/model", 9), "far:1234"
        told = self.pool._workers["r1", 1]
        stub = cast(pb.EngineStub, self.stub)
        told.stub, told.calls = stub, WorkerCalls("r1", 1, stub, self.kept, 1.0)

    async def perform(self, command: cmd.Command, live: LiveRequest | None = None) -> Any:
        """What the worker was asked."""
        self.pool.perform(command, live)
        await asyncio.gather(*self.pool._workers["r1", 1].tasks)
        for worker in list(self.pool._workers.values()):
            worker.close()
        return self.stub.asked[-1]


def live_request() -> LiveRequest:
    return LiveRequest(5, GenerateRequest((1, 2, 3), 8), 0, nothing)


FOLLOW = cmd.FollowLive(3, "r1", 1, "r2", 1)


@pytest.mark.parametrize(
    ("answer", "taken", "fault", "reason"),
    [
        (pb.FollowLiveReply(taken=5), 5, "", ""),
        (
            pb.FollowLiveReply(taken=2, fault=pb.HandoverFault.SOURCE, reason="r2/1: gone"),
            2,
            "source",
            "r2/1: gone",
        ),
        (GRPCError(Status.UNAVAILABLE, "no model"), 0, "target", "unavailable: no model"),
    ],
)
def test_the_end_of_following_is_told_whatever_it_is(
    tmp_path: Path, answer: object, taken: int, fault: str, reason: str
) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path, answer)
        call = await pool.perform(FOLLOW)
        assert (call.source_replica, call.source_epoch) == ("r2", 1)
        assert call.source_endpoint.endswith("r2-1.sock")
        assert call.transport is pb.Transport.MAP
        assert pool.kept.posted == [ev.FollowEnded(3, "r1", 1, taken, fault, reason)]

    asyncio.run(scenario())


def test_the_two_halves_of_a_kv_are_asked_of_who_has_them(tmp_path: Path) -> None:
    async def scenario(afar: str) -> pb.ImportKvRequest:
        pool = Pool(tmp_path, afar=afar)
        hop = ("r2", 1, "r1", 1)
        halves = {"rest": "r0", "rest_epoch": 1, "split_layer": 2}
        command = cmd.ImportKv(1, 5, *hop, 100, 1000, False, 0, **halves)
        call: pb.ImportKvRequest = await pool.perform(command, live_request())
        assert pool.kept.posted == [ev.ImportEnded(1, 7, 0)]
        return call

    call = asyncio.run(scenario(""))
    assert call.rest is not None
    assert (call.source_replica, call.rest.replica_id, call.rest.epoch) == ("r2", "r0", 1)
    assert (call.split_layer, call.transport) == (2, pb.Transport.MAP)
    assert call.rest.endpoint.endswith("r0-1.sock")
    call = asyncio.run(scenario("r0"))
    assert call.rest is not None
    assert (call.rest.endpoint, call.transport) == ("far:1234", pb.Transport.UCX), "no map of both"


def test_a_whole_kv_has_no_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        command = cmd.ImportKv(1, 5, "r0", 1, "r1", 1, 100, 1000, False)
        call = await Pool(tmp_path).perform(command, live_request())
        assert (call.rest, call.split_layer) == (None, 0)

    asyncio.run(scenario())


def test_a_live_load_says_its_blocks_from_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        pool = Pool(tmp_path)
        call = await pool.perform(cmd.LoadModel("r1", 1, (("r0", 1),), "p2p", 50, live=True))
        assert (call.live, call.floor_ms, len(call.peers)) == (True, 50, 1)
        moved, ended = pool.kept.posted
        assert isinstance(moved, ev.LoadMoved) and isinstance(ended, ev.LoadEnded)
        assert (moved.block_tokens, moved.blocks_total) == (64, 9)

    asyncio.run(scenario())


# What the workers report.


async def live(world: World) -> LiveRequest:
    """A request granted to r2, which loads; r0 finishes for it."""
    await anyio.sleep(0.1)
    await world.serve()
    await world.driver.post(ev.LivePairRequested("r2", "r0"))
    await world.driver.post(ev.LoadMoved("r2", 1, 0, 2, 1, 9, "r1", 64, 64))
    await anyio.sleep(0.01)
    one = await world.driver.generate(GenerateRequest(prompt_tokens=(1,), max_tokens=9))
    await anyio.sleep(0.01)
    assert world.core.state.requests[one.request_id].source == "r2"
    return one


def report(one: LiveRequest, attempt: int = 0, **rows: Any) -> pb.StepReport:
    """Of a step that made a token, unless `rows` says otherwise."""
    token = {"token_ids": [9], "texts": ["x"], "finish": [pb.FinishReason.HELD]}
    ids = [wire_id(one.request_id, attempt)]
    return pb.StepReport(**{"request_ids": ids, **token, **rows})


def test_old_makes_the_first_token_of_what_new_was_given() -> None:
    """And says with it that it went on with the request; New has not said so yet."""

    async def scenario(world: World) -> None:
        one = await live(world)
        stale = world.core.state.node.tallies.get("stale_notices", 0)
        relayed = {"relayed_ids": [wire_id(one.request_id, 0)], "relayed_layers": [1]}
        await world.driver.deliver("r0", 1, report(one, **relayed))
        await anyio.sleep(0.01)
        assert one.output == [9]
        [command] = [c for c, _ in world.workers.done if isinstance(c, cmd.ImportKv)]
        assert (command.source, command.rest, command.split_layer) == ("r2", "r0", 1)
        assert world.core.state.node.tallies.get("stale_notices", 0) == stale

    run(scenario, roles=("prefill", "decode", "spare"))


def test_what_a_stranger_or_an_earlier_attempt_says_goes_nowhere() -> None:
    async def scenario(world: World) -> None:
        one = await live(world)
        await world.driver.deliver("r1", 1, report(one))
        await world.driver.deliver("r0", 2, report(one))
        await world.driver.deliver("r0", 1, report(one, attempt=1))
        ids = [wire_id(one.request_id, 1)]
        rows: dict[str, Any] = {"relayed_ids": ids, "relayed_layers": [1], "request_ids": []}
        rows |= {"token_ids": [], "texts": [], "finish": []}
        await world.driver.deliver("r2", 1, report(one, **rows))
        await anyio.sleep(0.01)
        assert one.output == []
        assert world.core.state.requests[one.request_id].source == "r2"
        assert not [r for r in world.disk.records if isinstance(r.payload, ev.RequestRelayed)]

    run(scenario, roles=("prefill", "decode", "spare"))
