"""Group commit, in virtual time: no thread takes part."""

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from log_samples import FIRST_TYPE_ID, Ticked, record, records
from trio.testing import MockClock

from blitzd.events import Durability, Kind, LogUnavailable, LogWriter, Payload, Record, record_type
from blitzd.events.commit import GroupCommit
from blitzd.events.virtual_disk import VirtualDisk

SYNC_S = 0.002


@record_type(FIRST_TYPE_ID + 20, Kind.EVENT, Durability.ACK)
class Commanded(Payload, frozen=True, array_like=True):
    what: str


class SlowDisk(VirtualDisk):
    syncs = 0
    broken = False

    def fdatasync(self, fd: int) -> None:
        self.syncs += 1
        if self.broken:
            raise OSError(errno.EIO, "Input/output error")
        super().fdatasync(fd)


def in_virtual_time(
    scenario: Callable[[GroupCommit, LogWriter, SlowDisk], Awaitable[None]],
) -> None:
    async def slow(sync: Callable[[], int]) -> int:
        durable_seq = sync()
        await anyio.sleep(SYNC_S)
        return durable_seq

    async def main() -> None:
        disk = SlowDisk()
        writer = LogWriter.open(Path("/log"), disk=disk)
        commit = GroupCommit(writer, run_sync=slow)
        disk.syncs = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(commit.run)
            await scenario(commit, writer, disk)
            tasks.cancel_scope.cancel()

    clock: Any = MockClock(autojump_threshold=0)
    trio.run(main, clock=clock)


def command(seq: int) -> Record:
    return Record(seq, 0, seq * 10, 0, Commanded("scale"))


def test_an_acknowledged_record_waits_for_one_sync() -> None:
    async def scenario(commit: GroupCommit, writer: LogWriter, disk: SlowDisk) -> None:
        begin = anyio.current_time()
        commit.append([command(1)])
        await commit.durable(1)
        assert anyio.current_time() - begin == pytest.approx(SYNC_S)
        assert writer.durable_seq == 1

    in_virtual_time(scenario)


def test_others_are_on_disk_within_the_group_time_without_anyone_waiting() -> None:
    async def scenario(commit: GroupCommit, writer: LogWriter, disk: SlowDisk) -> None:
        assert Ticked.durability is Durability.GROUP
        commit.append([record(1)])
        await anyio.sleep(0.0099)
        assert writer.durable_seq == 0
        commit.append([record(2)])
        await anyio.sleep(0.0002)
        assert writer.durable_seq == 2
        assert disk.syncs == 1

    in_virtual_time(scenario)


def test_those_who_come_during_a_sync_share_the_next() -> None:
    async def scenario(commit: GroupCommit, writer: LogWriter, disk: SlowDisk) -> None:
        begin = anyio.current_time()
        done: list[float] = []

        async def client(seq: int, at: float) -> None:
            await anyio.sleep(at)
            commit.append([command(seq)])
            await commit.durable(seq)
            done.append(round((anyio.current_time() - begin) / SYNC_S, 3))

        async with anyio.create_task_group() as clients:
            for seq in range(1, 51):
                clients.start_soon(client, seq, (seq - 1) * SYNC_S / 100)
        assert done == [1.0] + [2.0] * 49
        assert disk.syncs == 2

    in_virtual_time(scenario)


def test_a_failed_sync_is_told_to_all_who_wait() -> None:
    refused = []

    async def scenario(commit: GroupCommit, writer: LogWriter, disk: SlowDisk) -> None:
        disk.broken = True

        async def client(seq: int) -> None:
            with pytest.raises(LogUnavailable, match="broken"):
                await commit.durable(seq)
            refused.append(seq)

        commit.append(records(1, 3))
        async with anyio.create_task_group() as clients:
            for seq in (1, 2, 3):
                clients.start_soon(client, seq)
        with pytest.raises(LogUnavailable):
            await commit.durable(3)

    with pytest.raises(BaseExceptionGroup) as group:
        in_virtual_time(scenario)
    assert group.group_contains(LogUnavailable)
    assert sorted(refused) == [1, 2, 3]


def test_with_a_thread_on_a_real_disk(tmp_path: Path) -> None:
    async def main() -> None:
        writer = LogWriter.open(tmp_path)
        commit = GroupCommit(writer)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(commit.run)

                async def client(first: int) -> None:
                    for _ in range(20):
                        seq = writer.last_seq + 1
                        commit.append([record(seq)])
                        await commit.durable(seq)
                        assert writer.durable_seq >= seq

                async with anyio.create_task_group() as clients:
                    for first in range(8):
                        clients.start_soon(client, first)
                tasks.cancel_scope.cancel()
        assert writer.last_seq == 160
        writer.close()

    anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})
