"""A daemon starts from its newest snapshot and what came after it; over real directories."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from blitzd.control import commands as cmd
from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.events import (
    LogCorrupt,
    LogError,
    LogReader,
    LogWriter,
    Record,
    Snapshot,
    apply_retention,
    types as ev,
    write_snapshot,
)
from blitzd.events.disk import OsDisk
from blitzd.events.snapshot import snapshot_path, snapshot_seqs
from blitzd.fsm import ClusterState
from blitzd.fsm.replaying import replay
from blitzd.node.driver import Driver
from blitzd.node.journal import FileJournal
from blitzd.node.live import LiveRequest
from blitzd.node.observe import new_observations
from blitzd.node.ports import JournalUnavailable
from blitzd.node.restore import restore
from tests.chaos.world import VirtualClock
from tests.corpus import with_faults

CORPUS = with_faults()[0]
RECORDS = list(LogReader(CORPUS).records())
TURN_ENDS = [after.seq - 1 for after in RECORDS[1:] if not after.cause] + [RECORDS[-1].seq]


class NoWorkers:
    def perform(self, command: cmd.Command, live: LiveRequest | None) -> None:
        pass


def live_once(state_dir: Path, requests: int, kept: int = 2, stop: bool = True) -> ClusterState:
    """A boot of the real driver on a real log, that takes `requests` and (cleanly) stops."""
    writer = LogWriter.open(state_dir / "log", segment_bytes=2000)
    core = Core(restore(state_dir))

    async def life() -> None:
        journal = FileJournal(writer, state_dir / "log", kept)
        first = (writer.boot_epoch << 32) + 1
        driver = Driver(core, journal, VirtualClock(), new_observations(), lambda: 7, first)
        roles, policy = (("r0", "prefill"), ("r1", "decode")), Policy().pairs()
        async with anyio.create_task_group() as tasks:
            boot = ev.Booted(writer.boot_epoch, "t", "local", roles, policy, CORE_VERSION)
            tasks.start_soon(driver.run, NoWorkers(), boot)
            for request in range(first, first + requests):
                await driver.post(ev.RequestArrived(request, 10, 10, 7, 0))
            if stop:
                await driver.post(ev.StopRequested("SIGTERM", 0))
            else:
                while len(core.state.requests) < requests:  # noqa: ASYNC110 - a driver has no event
                    await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()

    async def main() -> None:
        with anyio.fail_after(20):
            await life()

    try:
        anyio.run(main)
    finally:
        writer.close()
    return core.state


def seqs(state_dir: Path) -> list[int]:
    return snapshot_seqs(OsDisk(), state_dir / "log")


def test_a_clean_stop_leaves_a_snapshot_of_the_last_record(tmp_path: Path) -> None:
    state = live_once(tmp_path, 5)
    assert seqs(tmp_path) == [state.seq]
    assert state.node.phase == "stopped"
    again = restore(tmp_path)
    assert (again.seq, again.hash(), again.encode()) == (state.seq, state.hash(), state.encode())


def test_a_killed_daemon_starts_from_the_snapshot_and_the_tail(tmp_path: Path) -> None:
    stopped = live_once(tmp_path, 5)
    killed = live_once(tmp_path, 3, stop=False)
    assert seqs(tmp_path) == [stopped.seq]
    again = restore(tmp_path)
    assert again.seq > stopped.seq
    assert (again.seq, again.hash()) == (killed.seq, killed.hash())
    assert len(again.requests) == 3


def test_starts_take_the_old_away_and_lose_nothing(tmp_path: Path) -> None:
    for _ in range(5):
        state = live_once(tmp_path, 20, kept=2)
    assert len(seqs(tmp_path)) == 2
    first = LogReader(tmp_path).first_seq
    assert 1 < first <= seqs(tmp_path)[0] + 1
    again = restore(tmp_path)
    assert again.hash() == state.hash()
    assert again.node.tallies["failed"] == 100, "tallies reach back before the log does"


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    for _ in range(3):
        state = live_once(tmp_path, 5, kept=3)
    newest = snapshot_path(tmp_path / "log", seqs(tmp_path)[-1])
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    assert restore(tmp_path).hash() == state.hash()


@pytest.mark.parametrize("what", ["no state", "another state"])
def test_a_snapshot_of_something_else_is_passed_over(tmp_path: Path, what: str) -> None:
    state = live_once(tmp_path, 5)
    other = ClusterState.decode(state.encode())
    other.node.wanted_prefill = 7
    contents = b"\x93nonsense" if what == "no state" else other.encode()
    write_snapshot(tmp_path / "log", Snapshot(state.seq, state.hash(), contents))
    assert restore(tmp_path).hash() == state.hash()


def test_without_its_beginning_and_without_a_snapshot_a_log_is_refused(tmp_path: Path) -> None:
    for _ in range(4):
        live_once(tmp_path, 20, kept=2)
    for seq in seqs(tmp_path):
        snapshot_path(tmp_path / "log", seq).write_bytes(b"damaged")
    with pytest.raises(LogError, match="no snapshot that can be read covers"):
        restore(tmp_path)
    with pytest.raises(LogCorrupt):
        LogWriter.open(tmp_path / "log")


def test_a_snapshot_ahead_of_its_log_is_refused(tmp_path: Path) -> None:
    """It would be taken as proof that records were lost."""
    writer = LogWriter.open(tmp_path / "log")
    journal = FileJournal(writer, tmp_path / "log")
    journal.append(RECORDS[:3])

    async def main() -> None:
        with pytest.raises(JournalUnavailable, match="record 4 is not in the log yet"):
            await journal.snapshot(Snapshot(4, "", b""))

    anyio.run(main)
    assert journal.snapshot_seq == 0
    assert seqs(tmp_path) == []
    writer.close()


def test_a_snapshot_s_records_are_on_disk_before_it_is(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path / "log")
    journal = FileJournal(writer, tmp_path / "log")
    journal.append(RECORDS[:3])
    assert writer.durable_seq == 0
    anyio.run(journal.snapshot, Snapshot(3, "", b""))
    assert (writer.durable_seq, journal.snapshot_seq) == (3, 3)
    writer.close()


def test_a_hash_that_differs_is_reported_and_the_log_is_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Record(RECORDS[-1].seq + 1, 0, RECORDS[-1].mono_ns, 0, ev.StateHashed("0" * 64))
    after = ev.ScaleSet(1, 1)
    write(tmp_path, [*RECORDS, wrong, Record(wrong.seq + 1, 0, wrong.mono_ns, 0, after)])
    state = restore(tmp_path)
    expected = whole()
    expected.node.wanted_prefill = expected.node.wanted_decode = 1
    expected.touch("node", 0)
    assert (state.seq, state.hash()) == (wrong.seq + 1, expected.hash())
    assert f"record {wrong.seq} says that the state's hash was 000" in capsys.readouterr().out


def write(directory: Path, records: Sequence[Record]) -> None:
    writer = LogWriter.open(directory / "log", segment_bytes=4000)
    for first in range(0, len(records), 20):
        writer.append(records[first : first + 20])
        writer.sync()
    writer.close()


def whole() -> ClusterState:
    state = ClusterState()
    replay(state, RECORDS)
    return state


@pytest.fixture(scope="module")
def whole_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    write(directory, RECORDS)
    return directory


@given(st.sets(st.sampled_from(TURN_ENDS), min_size=2, max_size=4))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_snapshots_and_their_tails_give_what_the_whole_log_gives(
    whole_log: Path, tmp_path: Path, at: set[int]
) -> None:
    shutil.rmtree(tmp_path / "log", ignore_errors=True)
    shutil.copytree(whole_log / "log", tmp_path / "log")
    for seq in at:
        state = ClusterState()
        replay(state, RECORDS[:seq])
        write_snapshot(tmp_path / "log", Snapshot(seq, state.hash(), state.encode()))
    apply_retention(tmp_path / "log")
    again = restore(tmp_path)
    assert (again.seq, again.hash(), again.encode()) == (
        RECORDS[-1].seq,
        whole().hash(),
        whole().encode(),
    )
