"""The driver when its log takes no records: serve on, begin nothing, say so, and still stop."""

from collections.abc import Sequence

import anyio
import pytest
from trio.testing import MockClock

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.node.face import GenerateRequest, RequestRefused
from blitzd.node.wire_ids import wire_id
from blitzd.proto.blitzd.engine import v1 as pb
from tests.chaos.world import VirtualDisk
from tests.node.driven import World, run

REQUEST = GenerateRequest(prompt_tokens=(1, 2, 3), max_tokens=4)


def test_every_command_comes_after_the_records_that_decided_it() -> None:
    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.serve()

    world = run(scenario)
    spawned = [at for c, at in world.workers.done if isinstance(c, cmd.SpawnWorker)]
    appended = [
        i + 1
        for i, record in enumerate(world.disk.records)
        if isinstance(record.payload, ev.WorkerSpawning)
    ]
    assert len(spawned) == len(appended) == 2
    assert all(done >= logged for done, logged in zip(spawned, appended, strict=True))


def test_nothing_begins_while_the_disk_is_full_and_all_of_it_afterwards() -> None:
    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.serve()
        world.disk.full = True
        await world.driver.post(ev.WorkerExited("r1", 1, "killed"))
        await anyio.sleep(1)
        assert world.workers.kinds().count(cmd.SpawnWorker) == 2
        with pytest.raises(RequestRefused) as refused:
            await world.driver.generate(REQUEST)
        assert refused.value.status == 503
        assert "no space left" in str(refused.value)
        world.disk.full = False
        await anyio.sleep(1)
        assert world.workers.kinds().count(cmd.SpawnWorker) == 3
        assert not world.driver.read_only
        await world.driver.generate(REQUEST)

    world = run(scenario)
    assert [r.seq for r in world.disk.records] == list(range(1, len(world.disk.records) + 1))


def test_a_node_whose_log_is_gone_for_good_still_stops() -> None:
    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.serve()
        world.disk.full = True
        await world.driver.post(ev.StopRequested("SIGTERM", 2**62))
        await anyio.sleep(1)
        assert cmd.ShutDown in world.workers.kinds()
        assert world.workers.kinds().count(cmd.EndWorker) == 2
        with pytest.raises(RequestRefused) as refused:
            await world.driver.generate(REQUEST)
        assert refused.value.code == "draining"

    run(scenario)


def test_the_last_token_of_the_last_request_ends_a_drain() -> None:
    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.serve()
        live = await world.driver.generate(GenerateRequest(prompt_tokens=(1,), max_tokens=1))
        await world.driver.post(ev.StopRequested("SIGTERM", 2**62))
        await anyio.sleep(0.1)
        assert cmd.ShutDown not in world.workers.kinds()
        last = pb.StepReport(
            request_ids=[wire_id(live.request_id, 0)],
            token_ids=[5],
            texts=["five"],
            finish=[pb.FinishReason.LENGTH],
        )
        await world.driver.deliver("r0", 1, last)
        # The worker dies right behind its last token: the request has finished all the same.
        await world.driver.post(ev.WorkerExited("r0", 1, "killed"))
        deltas = [delta async for delta in live]
        assert "".join(delta.text for delta in deltas) == "five"
        assert deltas[-1].finish == "length"
        await anyio.sleep(0.1)
        assert cmd.ShutDown in world.workers.kinds()

    run(scenario)


def test_a_stop_that_came_before_the_boot_is_not_forgotten() -> None:
    async def main() -> World:
        world = World()
        await world.driver.post(ev.StopRequested("SIGTERM", 2**62))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run)
            await anyio.sleep(1)
            assert cmd.ShutDown in world.workers.kinds()
            tasks.cancel_scope.cancel()
        return world

    clock = MockClock(autojump_threshold=0)
    world = anyio.run(main, backend="trio", backend_options={"clock": clock})
    assert isinstance(world.disk.records[0].payload, ev.Booted)


def test_a_disk_that_was_full_for_a_sync_alone_is_asked_again() -> None:
    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.serve()
        world.driver.read_only = "full while a segment was changed"
        await anyio.sleep(1)
        assert not world.driver.read_only
        await world.driver.generate(REQUEST)

    run(scenario)


def test_a_worker_whose_start_waits_for_the_log_is_not_ended_before_it() -> None:
    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.serve()
        world.disk.full = True
        await world.driver.post(ev.WorkerExited("r1", 1, "killed"))
        await world.driver.post(ev.RestartRequested("r1", 0))
        await anyio.sleep(1)
        assert world.core.state.replicas["r1"].worker == "stopping"
        world.disk.full = False
        await anyio.sleep(1)

    world = run(scenario)
    told = [c for c, _ in world.workers.done if getattr(c, "replica", "") == "r1"]
    assert told[-2:] == [cmd.SpawnWorker("r1", 2), cmd.EndWorker("r1", 2, report=True)]


def test_a_hand_over_that_waited_for_the_log_until_it_was_over_does_not_begin() -> None:
    """Its cancel was sent meanwhile, so nothing would end what it begins."""

    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.serve()
        await world.driver.post(ev.DrainRequested("r1", 0))
        await anyio.sleep(0.1)
        live = await world.driver.generate(REQUEST)
        first = pb.StepReport(
            request_ids=[wire_id(live.request_id, 0)],
            token_ids=[5],
            texts=["five"],
            finish=[pb.FinishReason.HELD],
        )
        await world.driver.deliver("r0", 1, first)
        await anyio.sleep(0.1)
        world.disk.full = True
        await world.driver.post(ev.UndrainRequested("r1"))
        await anyio.sleep(0.1)
        assert list(world.core.state.leases) == [1]
        await anyio.sleep(world.core.state.node.policy["lease_stall_ms"] / 1000 + 0.1)
        assert not world.core.state.leases
        world.disk.full = False
        await anyio.sleep(1)
        assert not world.driver.read_only

    world = run(scenario)
    assert cmd.ImportKv not in world.workers.kinds()


def test_a_request_that_nobody_will_decide_any_more_is_refused() -> None:
    async def scenario(world: World) -> None:
        await anyio.sleep(0.1)
        await world.driver.post(ev.StopRequested("SIGTERM", 2**62))
        with pytest.raises(RequestRefused) as refused:
            await world.driver.generate(REQUEST)
        assert refused.value.status == 503

    run(scenario)


def test_a_backlog_is_written_turn_by_turn() -> None:
    """A log bounds what it takes at once; the longest outage must not make one append of it."""
    sizes: list[int] = []

    class Counting(VirtualDisk):
        def append(self, records: Sequence[Record]) -> None:
            super().append(records)
            sizes.append(len(records))

    async def main() -> None:
        counting = Counting()
        world = World(counting)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run)
            await anyio.sleep(0.1)
            counting.full = True
            for _ in range(200):
                await world.driver.post(ev.ScaleRequested(9, 9))
            await anyio.sleep(1)
            counting.full = False
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()

    clock = MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})
    assert sum(sizes) > 400
    assert max(sizes) < 20
