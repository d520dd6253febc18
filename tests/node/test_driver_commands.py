"""An operator's command through the driver: answered by its own turn, from the disk."""

from collections.abc import Awaitable, Callable

import anyio
import pytest
from trio.testing import MockClock

from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.events import types as ev
from blitzd.fsm import ClusterState
from blitzd.node.driver import COMMAND_DEADLINE_S, Driver
from blitzd.node.face import CommandFailed
from blitzd.node.observe import new_observations
from tests.chaos.world import VirtualClock, VirtualDisk


class SlowDisk(VirtualDisk):
    """Knows how far it was synced; may take its time."""

    def __init__(self) -> None:
        super().__init__()
        self.durable_seq = 0
        self.sync_s = 0.0

    async def sync(self) -> None:
        seq = len(self.records)
        await super().sync()
        await anyio.sleep(self.sync_s)
        self.durable_seq = max(self.durable_seq, seq)


class Idle:
    def perform(self, command: object, live: object) -> None:
        pass


Scenario = Callable[[Driver, SlowDisk], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def main() -> None:
        disk = SlowDisk()
        core = Core(ClusterState())
        driver = Driver(core, disk, VirtualClock(), new_observations(), lambda: 7, 1)
        roles = (("r0", "prefill"), ("r1", "decode"), ("r2", "decode"))
        boot = ev.Booted(1, "t", "local", roles, Policy().pairs(), CORE_VERSION)
        with anyio.fail_after(1000):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(driver.run, Idle(), boot)
                await anyio.sleep(0.1)
                for replica in ("r0", "r1", "r2"):
                    await driver.post(ev.WorkerStarted(replica, 1, 1))
                    await driver.post(ev.WorkerDescribed(replica, 1, 1))
                    await driver.post(ev.LoadEnded(replica, 1, "d", "map", 2, 2, 64, 64))
                await anyio.sleep(0.1)
                await scenario(driver, disk)
                tasks.cancel_scope.cancel()

    clock = MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})


def test_it_is_answered_with_what_its_turn_decided_once_that_is_on_disk() -> None:
    async def scenario(driver: Driver, disk: SlowDisk) -> None:
        disk.sync_s = 2.0
        began = anyio.current_time()
        records = await driver.command(ev.DrainRequested("r1", 0))
        assert anyio.current_time() - began >= 2.0
        kinds = [type(record.payload) for record in records]
        assert kinds == [ev.DrainRequested, ev.ShutdownStarted, ev.ReplicaEmptied]
        assert disk.durable_seq >= records[-1].seq
        assert disk.records[records[0].seq - 1] == records[0]

    run(scenario)


def test_commands_that_come_at_once_each_get_their_own_answer() -> None:
    async def scenario(driver: Driver, disk: SlowDisk) -> None:
        answers: dict[str, list[str]] = {}

        async def drain(replica: str) -> None:
            records = await driver.command(ev.DrainRequested(replica, 0))
            answers[replica] = [getattr(r.payload, "replica", "") for r in records]

        async with anyio.create_task_group() as operators:
            for replica in ("r0", "r1", "r2", "r9"):
                operators.start_soon(drain, replica)
        assert {r: set(named) for r, named in answers.items()} == {
            r: {r} for r in ("r0", "r1", "r2", "r9")
        }

    run(scenario)


def test_what_changes_nothing_is_answered_too() -> None:
    async def scenario(driver: Driver, disk: SlowDisk) -> None:
        await driver.command(ev.DrainRequested("r1", 0))
        assert await driver.command(ev.DrainRequested("r1", 0)) == []

    run(scenario)


def test_a_command_that_is_not_decided_in_time_says_so() -> None:
    async def scenario(driver: Driver, disk: SlowDisk) -> None:
        disk.sync_s = 5 * COMMAND_DEADLINE_S
        began = anyio.current_time()
        with pytest.raises(CommandFailed) as failed:
            await driver.command(ev.DrainRequested("r1", 0))
        assert (failed.value.status, failed.value.code) == (503, "not_decided")
        assert anyio.current_time() - began == pytest.approx(COMMAND_DEADLINE_S)

    run(scenario)


def test_a_decision_that_the_log_does_not_take_is_no_success() -> None:
    async def scenario(driver: Driver, disk: SlowDisk) -> None:
        disk.full = True
        for _ in range(2):
            with pytest.raises(CommandFailed) as failed:
                await driver.command(ev.DrainRequested("r1", 0))
            assert (failed.value.status, failed.value.code) == (503, "read_only")
            assert "no space left" in str(failed.value)

    run(scenario)


def test_nobody_waits_for_a_driver_that_has_stopped() -> None:
    async def scenario(driver: Driver, disk: SlowDisk) -> None:
        async with anyio.create_task_group() as operators:

            async def late() -> None:
                with pytest.raises(CommandFailed) as failed:
                    await driver.command(ev.DrainRequested("r1", 0))
                assert failed.value.code == "stopping"

            disk.sync_s = 1.0
            await driver.post(ev.StopRequested("SIGTERM", 0))
            operators.start_soon(late)
        await anyio.sleep(5)
        with pytest.raises(CommandFailed):
            await driver.command(ev.DrainRequested("r1", 0))

    run(scenario)
