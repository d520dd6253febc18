"""The real driver in virtual time, over a log and workers that a test looks into."""

from collections.abc import Awaitable, Callable

import anyio
from trio.testing import MockClock

from blitzd.control import commands as cmd
from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.events import types as ev
from blitzd.fsm import ClusterState
from blitzd.node.driver import Driver
from blitzd.node.live import LiveRequest
from blitzd.node.observe import new_observations
from tests.chaos.world import VirtualClock, VirtualDisk


class Recorder:
    """Carries nothing out and remembers what it was told, and when in the log's life."""

    def __init__(self, disk: VirtualDisk) -> None:
        self.done: list[tuple[cmd.Command, int]] = []
        self._disk = disk

    def perform(self, command: cmd.Command, live: LiveRequest | None) -> None:
        self.done.append((command, len(self._disk.records)))

    def kinds(self) -> list[type]:
        return [type(command) for command, _ in self.done]


class World:
    def __init__(
        self, disk: VirtualDisk | None = None, roles: tuple[str, ...] = ("prefill", "decode")
    ) -> None:
        self.replicas = tuple((f"r{i}", role) for i, role in enumerate(roles))
        self.disk = disk or VirtualDisk()
        self.workers = Recorder(self.disk)
        self.core = Core(ClusterState())
        clock, observations = VirtualClock(), new_observations()
        self.driver = Driver(self.core, self.disk, clock, observations, lambda: 7, 1)

    async def run(self) -> None:
        policy = Policy().pairs()
        boot = ev.Booted(1, "t", "local", self.replicas, policy, CORE_VERSION)
        await self.driver.run(self.workers, boot)

    async def serve(self) -> None:
        for replica, _ in self.replicas:
            await self.driver.post(ev.WorkerStarted(replica, 1, 1))
            await self.driver.post(ev.WorkerDescribed(replica, 1, 1))
            await self.driver.post(ev.LoadEnded(replica, 1, "d", "map", 2, 2, 64, 64))
        await anyio.sleep(0.1)


def run(
    scenario: Callable[[World], Awaitable[None]],
    limit_s: float = 100,
    roles: tuple[str, ...] = ("prefill", "decode"),
) -> World:
    async def main() -> World:
        world = World(roles=roles)
        with anyio.fail_after(limit_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(world.run)
                await scenario(world)
                tasks.cancel_scope.cancel()
        return world

    clock = MockClock(autojump_threshold=0)
    return anyio.run(main, backend="trio", backend_options={"clock": clock})
