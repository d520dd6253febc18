"""What a client sees, and does not see, of a request that is resumed."""

import anyio
import pytest

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.node.face import GenerateRequest, GenerationFailed, RequestRefused
from blitzd.node.live import LiveRequest
from blitzd.node.wire_ids import request_and_attempt, wire_id
from blitzd.node.worker_calls import wire_request
from blitzd.proto.blitzd.engine import v1 as pb
from tests.node.driven import World, run

F = pb.FinishReason
REQUEST = GenerateRequest(prompt_tokens=(1, 2, 3), max_tokens=5)


def rows(live: LiveRequest, attempt: int, places: list[int], finish: F = F.NONE) -> pb.StepReport:
    """The token at a place is 100 more; `finish` is the last one's."""
    count = len(places)
    return pb.StepReport(
        request_ids=[wire_id(live.request_id, attempt)] * count,
        token_ids=[100 + place for place in places],
        texts=[f"<{place}>" for place in places],
        finish=[F.NONE] * (count - 1) + [finish],
    )


async def decoding(world: World) -> LiveRequest:
    """Two tokens are out, the second from r1."""
    await anyio.sleep(0.1)
    await world.serve()
    live = await world.driver.generate(REQUEST)
    await deliver(world, "r0", rows(live, 0, [0], F.HELD))
    await deliver(world, "r1", rows(live, 0, [1]))
    assert world.core.state.requests[live.request_id].state == "decoding"
    return live


async def deliver(world: World, replica: str, report: pb.StepReport, epoch: int = 1) -> None:
    await world.driver.deliver(replica, epoch, report)
    await anyio.sleep(0.01)


async def resumed(world: World, live: LiveRequest) -> None:
    """r1 has failed a step: the second attempt is with r0."""
    lost = pb.StepReport(
        failed_ids=[wire_id(live.request_id, 0)], errors=["NaN"], failed_alone=[False]
    )
    await deliver(world, "r1", lost)
    await anyio.sleep(0.2)


def started(world: World) -> list[cmd.StartPrefill]:
    return [c for c, _ in world.workers.done if isinstance(c, cmd.StartPrefill)]


def logged(world: World, kind: type) -> list[object]:
    return [r.payload for r in world.disk.records if isinstance(r.payload, kind)]


def test_the_second_worker_goes_on_where_the_client_is() -> None:
    async def scenario(world: World) -> None:
        live = await decoding(world)
        await resumed(world, live)
        assert [c.attempt for c in started(world)] == [0, 1]
        wire = wire_request(live)
        assert request_and_attempt(wire.request_id) == (live.request_id, 1)
        assert wire.output_tokens == [100, 101]
        await deliver(world, "r0", rows(live, 1, [2], F.HELD))
        await deliver(world, "r1", rows(live, 1, [3, 4], F.LENGTH))
        deltas = [delta async for delta in live]
        assert "".join(delta.text for delta in deltas) == "<0><1><2><3><4>"
        assert deltas[-1].finish == "length"

    run(scenario)


def test_rows_of_an_attempt_that_is_over_go_nowhere_and_are_counted() -> None:
    """A worker that was stopped and goes on, or whose cancel is still on its way."""

    async def scenario(world: World) -> None:
        live = await decoding(world)
        await resumed(world, live)
        await deliver(world, "r1", rows(live, 0, [2, 3, 4], F.LENGTH))
        assert live.output == [100, 101]
        await deliver(world, "r0", rows(live, 1, [2], F.HELD))
        # By now r1 has the second attempt too; the first is still another one.
        await deliver(world, "r1", rows(live, 0, [3, 4], F.LENGTH))
        assert live.output == [100, 101, 102]
        await deliver(world, "r1", rows(live, 1, [3, 4], F.LENGTH))
        assert live.output == [100, 101, 102, 103, 104]
        assert world.core.state.node.tallies["stale_notices"] == 2
        assert [o.rows for o in logged(world, ev.TokensOutdated)] == [3, 2]

    run(scenario)


def test_a_last_token_that_is_out_is_an_end_though_the_worker_dies_behind_it() -> None:
    async def scenario(world: World) -> None:
        live = await decoding(world)
        await world.driver.deliver("r1", 1, rows(live, 0, [2, 3, 4], F.LENGTH))
        await world.driver.post(ev.WorkerExited("r1", 1, "killed"))
        assert [delta async for delta in live][-1].finish == "length"
        assert not logged(world, ev.RequestResumed)

    run(scenario)


@pytest.mark.parametrize(("asked", "ends_s"), [(2000, 2.0), (None, 3600.0)])
def test_every_request_has_a_deadline(asked: int | None, ends_s: float) -> None:
    """peers.md B.1 #18 and #20: it is held until something serves, one deadline says how long,
    and then comes an error that is not the client's."""

    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        began = anyio.current_time()
        request = GenerateRequest(prompt_tokens=(1,), max_tokens=1, deadline_ms=asked)
        live = await world.driver.generate(request)
        with pytest.raises(GenerationFailed) as failed:
            [delta async for delta in live]
        assert failed.value.code == "deadline"
        assert str(failed.value).startswith("still queued after")
        assert anyio.current_time() - began == pytest.approx(ends_s, abs=0.6)

    run(scenario, limit_s=4000)


def test_a_longer_deadline_than_the_policys_is_refused() -> None:
    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        request = GenerateRequest(prompt_tokens=(1,), max_tokens=1, deadline_ms=3_600_001)
        with pytest.raises(RequestRefused) as refused:
            await world.driver.generate(request)
        assert (refused.value.status, refused.value.code) == (400, "invalid_value")
        assert str(refused.value) == "deadline_ms is 3600001; accepted: at most 3600000"
        assert not world.driver.live

    run(scenario)
