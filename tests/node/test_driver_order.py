"""Decide, append, sync where the record asks for it, act: in this order."""

import anyio
from trio.testing import MockClock

from blitzd.control import commands as cmd
from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.events import types as ev
from blitzd.events.record import Durability
from blitzd.fsm import ClusterState
from blitzd.node.driver import Driver
from blitzd.node.live import LiveRequest
from blitzd.node.observe import new_observations
from tests.chaos.world import VirtualClock, VirtualDisk


class SyncingDisk(VirtualDisk):
    """Knows how far it was synced."""

    def __init__(self) -> None:
        super().__init__()
        self.durable_seq = 0

    async def sync(self) -> None:
        seq = len(self.records)
        await super().sync()
        self.durable_seq = max(self.durable_seq, seq)


class Watcher:
    """Notes, for each command, whether what decided it was on disk."""

    def __init__(self, disk: SyncingDisk) -> None:
        self.disk = disk
        self.seen: list[tuple[cmd.Command, bool]] = []

    def perform(self, command: cmd.Command, live: LiveRequest | None) -> None:
        cause = max(r.cause for r in self.disk.records)
        turn = [r for r in self.disk.records if cause in (r.seq, r.cause)]
        acked = [r.seq for r in turn if r.payload.durability is Durability.ACK]
        self.seen.append((command, max(acked, default=0) <= self.disk.durable_seq))


def test_what_asks_for_it_is_on_disk_before_anything_acts_on_it() -> None:
    disk = SyncingDisk()
    watcher = Watcher(disk)

    async def main() -> None:
        core = Core(ClusterState())
        driver = Driver(core, disk, VirtualClock(), new_observations(), lambda: 7, 1)
        roles, policy = (("r0", "prefill"), ("r1", "decode")), Policy().pairs()
        async with anyio.create_task_group() as tasks:
            boot = ev.Booted(1, "t", "local", roles, policy, CORE_VERSION)
            tasks.start_soon(driver.run, watcher, boot)
            # Its workers are spawned before anyone can say that they have started.
            await anyio.sleep(0.1)
            for replica in ("r0", "r1"):
                await driver.post(ev.WorkerStarted(replica, 1, 1))
                await driver.post(ev.WorkerDescribed(replica, 1, 1))
            await driver.post(ev.StopRequested("SIGTERM", 0))

    clock = MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})
    kinds = {type(command) for command, _ in watcher.seen}
    assert kinds == {cmd.SpawnWorker, cmd.LoadModel, cmd.EndWorker, cmd.ShutDown}
    assert [command for command, on_disk in watcher.seen if not on_disk] == []
