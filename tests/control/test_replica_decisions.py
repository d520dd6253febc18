"""Replica transitions, each reached by feeding `step` an input. Numbers are the rows of the
original's table (reference 1.3)."""

from blitzd.control.commands import EndWorker, LoadModel, ResetWorker, SpawnWorker
from blitzd.events import types as ev
from tests.control.harness import MS, Harness, ReplicaState, only, refold


def test_boot_registers_and_spawns_every_replica_at_epoch_one() -> None:
    world = Harness()
    world.boot("prefill", "decode", "spare")
    assert world.commanded(SpawnWorker) == [SpawnWorker(f"r{i}", 1) for i in range(3)]
    assert [r.role for r in world.state.replicas.values()] == ["prefill", "decode", "spare"]


def test_01_inactive_to_loading_prefill_when_the_worker_attaches() -> None:
    world = Harness()
    world.boot("prefill")
    world.attach("r0")
    assert world.replica("r0").state is ReplicaState.LOADING_PREFILL
    assert world.commanded(LoadModel) == [LoadModel("r0", 1)]


def test_02_inactive_to_loading_decode_when_the_worker_attaches() -> None:
    world = Harness()
    world.boot("decode")
    world.attach("r0")
    assert world.replica("r0").state is ReplicaState.LOADING_DECODE


def test_a_spare_stays_inactive_without_weights() -> None:
    world = Harness()
    world.boot("spare")
    world.attach("r0")
    assert world.replica("r0").state is ReplicaState.INACTIVE
    assert not world.commanded(LoadModel)


def test_04_loading_prefill_to_prefill_when_loaded() -> None:
    world = Harness()
    world.boot("prefill")
    world.attach("r0")
    finished = only(world.load("r0"), ev.LoadFinished)
    replica = world.replica("r0")
    assert replica.state is ReplicaState.PREFILL
    assert (replica.layers_ready, replica.layers_total) == (30, 30)
    # The log says since when, and what caused it.
    assert world.log[replica.since_seq - 1].payload == finished
    assert isinstance(world.log[replica.cause_seq - 1].payload, ev.LoadEnded)


def test_05_and_07_loading_decode_opens_through_aus_decode() -> None:
    world = Harness()
    world.boot("decode")
    world.attach("r0")
    events = world.load("r0")
    assert [type(e) for e in events] == [ev.LoadFinished, ev.DecodeOpened]
    after_finish = refold(world.log[:-1])
    assert after_finish.replicas["r0"].state is ReplicaState.AUS_DECODE
    assert world.replica("r0").state is ReplicaState.DECODE


def test_a_failed_load_is_tried_again_after_a_back_off() -> None:
    world = Harness()
    world.boot("prefill")
    world.attach("r0")
    failed = ev.LoadEnded("r0", 1, "", "", 0, 0, 0, 0, "arena.bin: digest differs")
    world.feed(failed)  # the first failure is tried again at once
    assert world.replica("r0").state is ReplicaState.LOADING_PREFILL
    world.feed(failed)
    assert world.replica("r0").state is ReplicaState.INACTIVE
    world.after(ms=499)
    assert not world.commanded(LoadModel)
    world.after(ms=1)
    assert world.commanded(LoadModel) == [LoadModel("r0", 1)]


def test_a_dead_worker_fails_the_replica_and_comes_back_with_the_next_epoch() -> None:
    world = Harness().serving("prefill", "decode")
    events = world.feed(ev.WorkerExited("r1", 1, "killed by SIGKILL"))
    assert only(events, ev.WorkerLost).reason == "killed by SIGKILL"
    assert world.commanded(SpawnWorker) == [SpawnWorker("r1", 2)]
    replica = world.replica("r1")
    assert (replica.state, replica.digest, replica.blocks_total) == (ReplicaState.FAILED, "", 0)
    world.attach("r1")
    assert world.replica("r1").state is ReplicaState.LOADING_DECODE


def test_a_crash_loop_is_slowed_down_to_the_configured_bound() -> None:
    world = Harness(restart_backoff_ms=500, restart_backoff_max_ms=2000)
    world.boot("prefill")
    waits = []
    for _ in range(6):
        world.feed(ev.WorkerExited("r0", world.replica("r0").epoch, "exited with status 1"))
        waits.append((world.replica("r0").retry_ns - world.now) // MS)
        world.after(ms=waits[-1])
    assert waits == [0, 500, 1000, 2000, 2000, 2000]


def test_a_load_that_succeeds_forgives_earlier_failures() -> None:
    world = Harness().serving("prefill")
    for _ in range(3):
        world.feed(ev.WorkerExited("r0", world.replica("r0").epoch, "killed"))
        assert world.commanded(SpawnWorker), "restarted at once"
        world.attach("r0")
        world.load("r0")


def test_messages_of_an_old_epoch_are_counted_and_change_nothing_else() -> None:
    world = Harness().serving("prefill", "decode")
    world.feed(ev.WorkerExited("r0", 1, "killed"))
    world.attach("r0")
    before = world.replica("r0").state
    for stale in (
        ev.WorkerExited("r0", 1, "again"),
        ev.LoadEnded("r0", 1, "d", "map", 30, 1, 64, 64),
        ev.OccupancyReported("r0", 1, 5, 5),
        ev.FirstTokenProduced("r0", 1, 1),
        ev.GenerationEnded("r0", 1, 1, "stop", 1, ""),
        ev.RequestErrored("r0", 1, 1, "late"),
    ):
        [event] = world.feed(stale)
        assert event == ev.StaleNoticeIgnored(type(stale).__name__, "r0", 1)
    assert world.replica("r0").state is before
    assert world.state.to_json()["node"]["stale_notices"] == 6


def test_boot_keeps_workers_that_still_answer_and_replaces_the_others() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    events = world.boot("prefill", "decode", adopted=(("r1", 1, 101),))
    assert only(events, ev.RequestFailed).code == "daemon_restarted"
    assert world.commanded(ResetWorker) == [ResetWorker("r1", 1)]
    assert world.commanded(EndWorker) == [EndWorker("r0", 1)]
    assert world.commanded(SpawnWorker) == [SpawnWorker("r0", 2)]
    assert world.replica("r1").state is ReplicaState.DECODE


def test_boot_with_fewer_replicas_retires_the_rest() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    adopted = tuple((f"r{i}", 1, 100 + i) for i in range(3))
    world.boot("prefill", "decode", adopted=adopted)
    assert list(world.state.replicas) == ["r0", "r1"]
    assert EndWorker("r2", 1) in world.commands
