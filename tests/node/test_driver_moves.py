"""A request that moves while it decodes: what its client gets when the new place dies at once."""

import anyio

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.node.face import GenerateRequest
from blitzd.node.live import LiveRequest
from blitzd.node.wire_ids import wire_id
from blitzd.proto.blitzd.engine import v1 as pb
from tests.node.driven import World, run

F = pb.FinishReason
ROLES = ("prefill", "decode", "decode")


async def token(world: World, replica: str, live: LiveRequest, at: int, finish: F = F.NONE) -> None:
    report = pb.StepReport(
        request_ids=[wire_id(live.request_id, live.attempt)],
        token_ids=[100 + at],
        texts=[f"<{at}>"],
        finish=[finish],
    )
    await world.driver.deliver(replica, 1, report)


async def moving(world: World) -> LiveRequest:
    """r1 has made two tokens and holds the KV; r2 has the lease."""
    await anyio.sleep(0.1)
    await world.serve()
    live = await world.driver.generate(GenerateRequest(prompt_tokens=(1,), max_tokens=200))
    await token(world, "r0", live, 0, F.HELD)
    await anyio.sleep(0.01)
    await world.driver.post(ev.ImportEnded(1, 1000, 10))
    await anyio.sleep(0.01)
    await token(world, "r1", live, 1)
    await world.driver.post(ev.DrainRequested("r1", 0))
    await anyio.sleep(0.01)
    await token(world, "r1", live, 2, F.HELD)
    await anyio.sleep(0.01)
    request = world.core.state.requests[live.request_id]
    assert (request.source, request.target, request.lease_id) == ("r1", "r2", 2)
    return live


def test_a_token_of_the_new_place_ends_the_lease_before_its_answer() -> None:
    """The old place must never go on from KV that the client has tokens beyond."""

    async def scenario(world: World) -> None:
        live = await moving(world)
        await token(world, "r2", live, 3)
        await token(world, "r2", live, 4)
        await world.driver.post(ev.WorkerExited("r2", 1, "killed"))
        await anyio.sleep(0.2)
        assert not [c for c, _ in world.workers.done if isinstance(c, cmd.DecodeLocally)]
        assert world.core.state.requests[live.request_id].output_tokens == 5
        assert world.core.state.node.tallies.get("stale_notices", 0) == 0

    run(scenario, roles=ROLES)


def test_a_new_place_that_dies_before_its_first_token_leaves_it_where_it_was() -> None:
    async def scenario(world: World) -> None:
        live = await moving(world)
        await world.driver.post(ev.WorkerExited("r2", 1, "killed"))
        await anyio.sleep(0.2)
        [stays] = [c for c, _ in world.workers.done if isinstance(c, cmd.DecodeLocally)]
        assert (stays.replica, stays.request_id) == ("r1", live.request_id)
        await token(world, "r1", live, 3, F.LENGTH)
        assert "".join([delta.text async for delta in live]) == "<0><1><2><3>"

    run(scenario, roles=ROLES)
