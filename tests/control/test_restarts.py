"""Planned restarts as decisions of the core: of one replica, of all in turn."""

import pytest

from blitzd.control.commands import EndWorker, LoadModel, SpawnWorker
from blitzd.events import types as ev
from blitzd.fsm import ClusterState
from tests.control.harness import MS, Harness, ReplicaState, RequestState, only


def decoding(*roles: str, requests: int = 1, **policy: int) -> Harness:
    world = Harness(**policy).serving(*roles)
    for request_id in range(1, requests + 1):
        world.arrive(request_id)
        world.first_token(request_id)
        world.imported(request_id)
    return world


def exits(world: Harness, replica_id: str) -> None:
    epoch = world.replica(replica_id).epoch
    world.feed(ev.WorkerExited(replica_id, epoch, "exited with status 0"))


def comes_back(world: Harness, replica_id: str) -> None:
    """Its old worker goes, its new one attaches and loads."""
    exits(world, replica_id)
    assert SpawnWorker(replica_id, world.replica(replica_id).epoch) in world.commands
    world.attach(replica_id)
    if world.replica(replica_id).role != "spare":
        world.load(replica_id)


def told(world: Harness) -> list[str]:
    """The events so far, without those of the boot."""
    return [type(r.payload).__name__ for r in world.log if r.cause]


def restarted(world: Harness) -> list[str]:
    """Who restarted, in order."""
    records = [r.payload for r in world.log]
    return [e.replica for e in records if isinstance(e, ev.RestartStarted)]


def test_a_restart_drains_ends_the_worker_and_takes_the_role_again() -> None:
    world = decoding("prefill", "decode", "decode")
    assert world.state.requests[1].target == "r1"
    before = len(told(world))
    world.feed(ev.RestartRequested("r1", 5000))
    assert world.replica("r1").state is ReplicaState.SHUTTING_DECODE
    assert world.replica("r1").drain_deadline_ns == world.now + 5000 * MS
    world.arrive(2)
    world.first_token(2)
    assert world.state.requests[2].target == "r2", "new ones go elsewhere from that event on"
    world.ended(1)
    assert world.commanded(EndWorker) == [EndWorker("r1", 1, report=True)]
    assert not world.commanded(SpawnWorker), "the machine does not hold both of them"
    world.now += 700 * MS
    comes_back(world, "r1")
    replica = world.replica("r1")
    assert (replica.state, replica.epoch, replica.role) == (ReplicaState.DECODE, 2, "decode")
    trail = told(world)[before:]
    wanted = ["RestartStarted", "ShutdownStarted", "ReplicaEmptied", "WorkerStopping"]
    wanted += ["WorkerStopped", "WorkerSpawning", "WorkerSpawned", "WorkerAttached"]
    wanted += ["LoadStarted", "LoadFinished", "DecodeOpened", "RestartEnded"]
    assert [name for name in trail if name in wanted] == wanted
    ended = only([r.payload for r in world.log], ev.RestartEnded)
    assert (ended.reason, ended.took_ns) == ("", 700 * MS)


def test_a_planned_end_is_no_failure_and_waits_for_no_back_off() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    for _ in range(5):
        world.feed(ev.RestartRequested("r0", 0))
        comes_back(world, "r0")
    replica = world.replica("r0")
    assert (replica.epoch, replica.failures, replica.trouble) == (6, 0, "")
    assert not [r for r in world.log if isinstance(r.payload, ev.WorkerLost)]


def test_a_restart_is_idempotent_and_visible_while_it_lasts() -> None:
    world = decoding("prefill", "decode", "decode")
    world.feed(ev.RestartRequested("r1", 5000))
    assert world.feed(ev.RestartRequested("r1", 9000)) == []
    shown = world.state.to_json()["replicas"][1]
    assert (shown["restarting"], shown["drain_deadline_ns"]) == (True, world.now + 5000 * MS)
    world.ended(1)
    comes_back(world, "r1")
    assert not world.state.to_json()["replicas"][1]["restarting"]


def test_at_its_deadline_a_restart_goes_on_and_what_ran_is_resumed() -> None:
    world = decoding("prefill", "decode")
    world.feed(ev.RestartRequested("r1", 100))
    resumed = only(world.after(ms=100), ev.RequestResumed)
    assert resumed.cause == "drain_deadline"
    assert world.replica("r1").worker == "stopping"
    world.first_token(1)
    comes_back(world, "r1")
    assert world.state.requests[1].target == "r1"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_restart_in_the_middle_of_a_change_of_role_has_its_deadline(role: str) -> None:
    world = decoding("prefill", "prefill", "decode", "decode")
    if role == "prefill":
        chosen = world.state.requests[1].target
    else:
        world.arrive(2)
        chosen = world.state.requests[2].source
    world.feed(ev.RoleRequested(chosen, role))
    assert world.replica(chosen).state in (
        ReplicaState.AUS_PREFILL,
        ReplicaState.MUTATING_TO_DECODE,
    )
    world.feed(ev.RestartRequested(chosen, 100))
    only(world.after(ms=100), ev.RequestResumed)
    world.after(ms=50)
    assert world.replica(chosen).worker == "stopping"
    comes_back(world, chosen)
    assert world.replica(chosen).role == role


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
def test_the_last_of_a_role_has_a_spare_stand_in_for_it(role: str) -> None:
    others = {"prefill": ["decode"], "decode": ["prefill"], "colocated": []}[role]
    world = Harness().serving(role, *others, "spare")
    spare = world.state.replicas[f"r{1 + len(others)}"]
    events = world.feed(ev.RestartRequested("r0", 0))
    assert only(events, ev.StandInCalled).stands_in_for == "r0"
    serving = world.replica("r0").state
    assert world.commanded(LoadModel) == [LoadModel(spare.id, 1)]
    world.after(ms=1000)
    assert world.replica("r0").state is serving, "it goes when the other serves, not before"
    world.load(spare.id)
    assert spare.state is serving
    assert world.replica("r0").worker == "stopping"
    comes_back(world, "r0")
    world.after(ms=50)
    assert world.replica("r0").state is serving
    assert (spare.state, spare.role) == (ReplicaState.SHUTTING_NULL, "spare")


def test_without_a_spare_the_last_one_restarts_and_its_requests_wait() -> None:
    world = Harness().serving("prefill", "decode")
    world.feed(ev.RestartRequested("r0", 0))
    assert world.replica("r0").worker == "stopping"
    world.arrive(1)
    assert world.request_state(1) is RequestState.QUEUED
    comes_back(world, "r0")
    assert world.request_state(1) is RequestState.PREFILLING


def test_what_a_draining_prefill_has_waits_for_the_decode_that_restarts() -> None:
    """B.1 #5: P/D hand-off works while either side drains."""
    world = Harness().serving("prefill", "prefill", "decode")
    world.arrive(1)
    world.feed(ev.RestartRequested("r2", 0))
    source = world.state.requests[1].source
    world.feed(ev.DrainRequested(source, 0))
    world.first_token(1)
    assert not world.state.requests[1].lease_id
    comes_back(world, "r2")
    assert world.state.requests[1].target == "r2"
    world.imported(1)
    assert world.replica(source).state is ReplicaState.SHUTTING_NULL
    only(world.ended(1), ev.RequestFinished)


def test_a_stand_in_that_does_not_come_up_holds_the_restart_no_longer_than_its_deadline() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.RestartRequested("r1", 2000))
    assert world.replica("r2").stands_in == "r1"
    world.after(ms=1999)
    assert world.replica("r1").state is ReplicaState.DECODE
    world.after(ms=1)
    assert world.replica("r1").worker == "stopping"
    comes_back(world, "r1")
    world.after(ms=50)
    stand_in = world.replica("r2")
    assert (stand_in.role, stand_in.stands_in, stand_in.worker) == ("spare", "", "stopping")


def test_a_stand_in_that_its_operator_wants_there_stays() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.RestartRequested("r1", 0))
    world.load("r2")
    world.feed(ev.RoleRequested("r2", "decode"))
    comes_back(world, "r1")
    world.after(ms=50)
    assert world.replica("r2").state is world.replica("r1").state is ReplicaState.DECODE


def test_a_stand_in_stays_when_the_other_does_not_come_back() -> None:
    world = Harness(drain_ms=1000, restart_limit_ms=5000).serving("prefill", "decode", "spare")
    world.feed(ev.RestartRequested("r1", 0))
    world.load("r2")
    exits(world, "r1")
    only(world.after(ms=7000), ev.StandInReleased)
    world.after(ms=50)
    assert world.replica("r2").state is ReplicaState.DECODE


def test_a_stand_in_stays_when_the_other_is_drained_meanwhile() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.RestartRequested("r1", 0))
    world.load("r2")
    world.feed(ev.DrainRequested("r1", 0))
    comes_back(world, "r1")
    world.after(ms=50)
    states = [world.replica(r).state for r in ("r1", "r2")]
    assert states == [ReplicaState.INACTIVE, ReplicaState.DECODE]
    assert not world.replica("r2").stands_in


def test_scaling_neither_replaces_one_that_restarts_nor_counts_its_stand_in() -> None:
    world = Harness().serving("prefill", "decode", "spare", "spare")
    world.feed(ev.ScaleRequested(1, 1))
    world.feed(ev.RestartRequested("r1", 0))
    world.load("r2")
    assert world.replica("r3").role == "spare"
    comes_back(world, "r1")
    world.after(ms=50)
    roles = {r.id: r.role for r in world.state.replicas.values()}
    assert roles == {"r0": "prefill", "r1": "decode", "r2": "spare", "r3": "spare"}


def test_a_failed_replica_restarts_without_its_back_off() -> None:
    world = Harness().serving("prefill", "decode")
    for _ in range(2):
        exits(world, "r0")
    assert world.replica("r0").worker == "absent"
    world.feed(ev.RestartRequested("r0", 0))
    assert world.commanded(SpawnWorker) == [SpawnWorker("r0", 3)]
    world.attach("r0")
    world.load("r0")
    assert not world.replica("r0").restart_epoch


def test_a_loading_replica_restarts_at_once() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.RoleRequested("r2", "decode"))
    world.feed(ev.RestartRequested("r2", 0))
    assert world.replica("r2").worker == "stopping"
    late = ev.LoadEnded("r2", 1, "digest", "map", 30, 1000, 64, 64)
    [event] = world.feed(late)
    assert isinstance(event, ev.StaleNoticeIgnored)
    comes_back(world, "r2")
    assert world.replica("r2").state is ReplicaState.DECODE


def test_a_worker_that_is_told_to_end_is_not_attached_by_a_late_answer() -> None:
    world = Harness().serving("prefill", "decode")
    exits(world, "r0")
    world.feed(ev.WorkerStarted("r0", 2, 55))
    world.feed(ev.RestartRequested("r0", 0))
    assert world.replica("r0").worker == "stopping"
    world.feed(ev.WorkerDescribed("r0", 2, 55))
    assert world.replica("r0").worker == "stopping"


@pytest.mark.parametrize("waits_for", ["its requests", "a stand-in"])
def test_undrain_calls_a_restart_off(waits_for: str) -> None:
    if waits_for == "its requests":
        world = decoding("prefill", "decode", "decode")
    else:
        world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.RestartRequested("r1", 0))
    events = world.feed(ev.UndrainRequested("r1"))
    assert only(events, ev.RestartEnded).reason == "undrained"
    world.after(ms=50)
    assert world.replica("r1").state is ReplicaState.DECODE
    assert world.replica("r1").epoch == 1
    assert world.replica("r2").role == ("spare" if waits_for == "a stand-in" else "decode")


def test_a_drain_during_a_restart_holds_after_it() -> None:
    world = decoding("prefill", "decode", "decode")
    world.feed(ev.RestartRequested("r1", 5000))
    only(world.feed(ev.DrainRequested("r1", 0)), ev.ReplicaCordoned)
    world.ended(1)
    comes_back(world, "r1")
    replica = world.replica("r1")
    assert (replica.state, replica.cordoned, replica.restart_epoch) == (
        ReplicaState.INACTIVE,
        1,
        0,
    )
    world.feed(ev.UndrainRequested("r1"))
    assert replica.state is ReplicaState.LOADING_DECODE


def test_a_restart_that_does_not_come_back_is_given_up_with_the_reason() -> None:
    world = Harness(drain_ms=1000, restart_limit_ms=5000).serving("prefill", "prefill", "decode")
    world.feed(ev.RestartRequested("r0", 0))
    exits(world, "r0")
    world.attach("r0")
    world.feed(ev.LoadEnded("r0", 2, "", "", 0, 0, 0, 0, "arena.bin: digest differs"))
    world.after(ms=6999)
    assert world.replica("r0").restart_epoch
    ended = only(world.after(ms=1), ev.RestartEnded)
    assert ended.reason == "not back after 7000 ms: arena.bin: digest differs"


def test_a_restart_whose_worker_does_not_end_is_given_up_too() -> None:
    world = Harness(drain_ms=1000, restart_limit_ms=5000).serving("prefill", "prefill", "decode")
    world.feed(ev.RestartRequested("r0", 0))
    ended = only(world.after(ms=7000), ev.RestartEnded)
    assert ended.reason == "not back after 7000 ms: it is Inactive with worker stopping"


def test_half_of_a_live_pair_does_not_restart() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))
    for half in ("r0", "r2"):
        refused = only(world.feed(ev.RestartRequested(half, 0)), ev.CommandRefused)
        assert "live pair" in refused.reason


# All in turn.


def roll(world: Harness) -> list[str]:
    """Lets a rolling restart run to its end; who restarted, in order."""
    for _ in range(50):
        world.after(ms=50)
        for replica in list(world.state.replicas.values()):
            if replica.worker == "stopping":
                exits(world, replica.id)
            elif replica.worker in ("spawning", "spawned"):
                world.attach(replica.id)
            elif replica.state.startswith("Loading"):
                world.load(replica.id)
        serving = {r.state for r in world.state.replicas.values()}
        assert {ReplicaState.PREFILL, ReplicaState.DECODE} <= serving, "nobody serves"
        if not world.state.node.rolling:
            return restarted(world)
    raise AssertionError("it does not end")


def test_a_rolling_restart_takes_one_of_each_role_at_a_time() -> None:
    world = Harness().serving("prefill", "prefill", "decode", "decode", "decode")
    world.feed(ev.RollingRestartRequested(0))
    busy = {r.id for r in world.state.replicas.values() if r.restart_epoch}
    assert busy == {"r0", "r2"}
    order = roll(world)
    assert sorted(order) == ["r0", "r1", "r2", "r3", "r4"]
    assert {r.epoch for r in world.state.replicas.values()} == {2}
    assert only([r.payload for r in world.log], ev.RollingRestartEnded).reason == ""


def test_a_rolling_restart_never_takes_the_last_of_a_role_while_a_spare_can_stand_in() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.RollingRestartRequested(0))
    assert roll(world) == ["r0", "r1", "r2"], "the spare last, since it stands in"
    assert {r.epoch for r in world.state.replicas.values()} == {2}
    assert [r.role for r in world.state.replicas.values()] == ["prefill", "decode", "spare"]


def test_a_rolling_restart_is_idempotent_and_goes_on_after_a_snapshot() -> None:
    world = Harness().serving("prefill", "prefill", "decode", "decode")
    world.feed(ev.RollingRestartRequested(0))
    assert world.feed(ev.RollingRestartRequested(0)) == []
    world.core.state = ClusterState.decode(world.state.encode())
    assert sorted(roll(world)) == ["r0", "r1", "r2", "r3"]


def test_a_rolling_restart_goes_on_after_a_boot() -> None:
    world = Harness().serving("prefill", "prefill", "decode", "decode")
    world.feed(ev.RollingRestartRequested(0))
    world.now = 0  # the machine was started anew, and so was its clock
    roles = [r.configured for r in world.state.replicas.values()]
    world.boot(*roles, adopted=(("r1", 1, 101), ("r3", 1, 103)))
    order = roll(world)
    assert sorted(set(order)) == ["r0", "r1", "r2", "r3"]
    assert {r.epoch for r in world.state.replicas.values()} == {2}


def test_a_worker_that_died_meanwhile_is_new_already() -> None:
    world = Harness().serving("prefill", "prefill", "prefill", "decode", "decode")
    world.feed(ev.RollingRestartRequested(0))
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    assert "r1" not in roll(world)


def test_a_rolling_restart_stops_at_one_that_does_not_come_back() -> None:
    world = Harness(drain_ms=1000, restart_limit_ms=5000).serving("prefill", "prefill", "decode")
    world.feed(ev.RollingRestartRequested(0))
    exits(world, "r0")
    comes_back(world, "r2")
    events = world.after(ms=7000)
    assert only(events, ev.RollingRestartEnded).reason == "r0 did not come back"
    assert world.replica("r1").state is ReplicaState.PREFILL
    assert world.replica("r1").epoch == 1


def test_undrain_takes_one_out_of_a_rolling_restart() -> None:
    world = decoding("prefill", "prefill", "decode", "decode")
    world.feed(ev.RollingRestartRequested(60_000))
    assert world.replica("r2").state is ReplicaState.SHUTTING_DECODE
    world.feed(ev.UndrainRequested("r2"))
    assert sorted(roll(world)) == ["r0", "r1", "r2", "r3"]
    assert [r.epoch for r in world.state.replicas.values()] == [2, 2, 1, 2]


def test_a_rolling_restart_that_is_called_off_ends_what_it_began_and_no_more() -> None:
    world = Harness().serving("prefill", "prefill", "decode", "decode")
    world.feed(ev.RollingRestartRequested(0))
    ended = only(world.feed(ev.RollingRestartStopRequested()), ev.RollingRestartEnded)
    assert ended.reason == "called off"
    assert world.feed(ev.RollingRestartStopRequested()) == []
    for replica_id in ("r0", "r2"):
        comes_back(world, replica_id)
    world.after(ms=50)
    assert [r.epoch for r in world.state.replicas.values()] == [2, 1, 2, 1]
    assert not any(r.restart_epoch for r in world.state.replicas.values())


def test_nothing_restarts_any_more_once_the_node_drains() -> None:
    world = decoding("prefill", "prefill", "decode")
    world.feed(ev.RollingRestartRequested(0))
    world.feed(ev.StopRequested("SIGTERM", world.now + 10_000 * MS))
    exits(world, "r0")
    world.after(ms=50)
    assert "r1" not in restarted(world)
    only(world.ended(1), ev.NodeStopped)
