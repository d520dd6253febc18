"""Workers of other nodes outlive a restart of the controller."""

import pytest

from blitzd.control.agents import awaited
from blitzd.control.commands import (
    EndWorker,
    ImportKv,
    LoadModel,
    ResetWorker,
    SpawnWorker,
    StartPrefill,
)
from blitzd.control.core import CORE_VERSION
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm import ClusterState
from tests.control.harness import Harness, ReplicaState, only, refold
from tests.control.test_agent_decisions import join, joined

S = ReplicaState


def reboot(world: Harness, boot_epoch: int = 2) -> list[Payload]:
    """Of a controller whose own workers are all there still."""
    own = [r for r in world.state.replicas.values() if r.node == "local"]
    return world.feed(
        ev.Booted(
            boot_epoch,
            "test",
            "local",
            tuple((r.id, r.configured) for r in own),
            world.policy.pairs(),
            CORE_VERSION,
            tuple((r.id, r.epoch, r.pid) for r in own),
        )
    )


def find(world: Harness, replica_id: str, epoch: int = 1, digest: str = "digest") -> list[Payload]:
    blocks = 64 if digest else 0
    return world.feed(ev.WorkerFound(replica_id, epoch, 500, digest, 30, 1000, 64, blocks))


def names(events: list[Payload]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_worker_is_adopted_with_its_weights_and_serves_in_its_role() -> None:
    world = joined("decode", "prefill")
    world.arrive(1)
    events = reboot(world)
    assert only(events, ev.NodeAwaited).node == "b"
    assert [e.replica for e in events if isinstance(e, ev.WorkerAwaited)] == ["b.r0", "b.r1"]
    assert world.commanded(SpawnWorker) == world.commanded(EndWorker) == []
    assert (world.replica("b.r0").state, world.replica("b.r0").worker) == (S.FAILED, "awaited")
    assert names(join(world, "decode", "prefill", epoch=2)) == ["NodeJoined"]
    assert names(find(world, "b.r0")) == ["WorkerAdopted", "NullReused"]
    assert world.commanded(ResetWorker) == [ResetWorker("b.r0", 1)]
    assert names(find(world, "b.r1")) == ["WorkerAdopted", "NullReused"]
    for replica_id, state in (("b.r0", S.DECODE), ("b.r1", S.PREFILL)):
        replica = world.replica(replica_id)
        assert (replica.state, replica.epoch, replica.pid) == (state, 1, 500)
        assert (replica.blocks_total, replica.trouble) == (64, "")
    assert not any(isinstance(r.payload, ev.LoadStarted) for r in world.log[-9:])


def test_nothing_is_given_to_a_worker_that_is_only_awaited() -> None:
    world = Harness().serving("prefill")
    join(world, "decode")
    world.attach("b.r0", pid=500)
    world.load("b.r0")
    reboot(world)
    world.arrive(1)
    world.first_token(1)
    assert world.commanded(ImportKv) == []
    join(world, "decode")
    find(world, "b.r0")
    [lease] = world.commanded(ImportKv)
    assert (lease.target, lease.target_epoch) == ("b.r0", 1)
    world.imported(1)
    world.ended(1)


def test_a_spare_without_weights_is_attached_as_it_is() -> None:
    world = joined("spare")
    reboot(world)
    join(world, "spare")
    assert names(find(world, "b.r0", digest="")) == ["WorkerAttached"]
    assert (world.replica("b.r0").state, world.replica("b.r0").trouble) == (S.INACTIVE, "")
    assert world.commanded(ResetWorker) == [ResetWorker("b.r0", 1)]
    assert world.commanded(LoadModel) == []


def test_a_worker_that_lost_its_weights_loads_them_again() -> None:
    world = joined("decode")
    reboot(world)
    join(world, "decode")
    assert names(find(world, "b.r0", digest="")) == ["WorkerAttached", "LoadStarted"]


def test_a_warm_spare_stays_warm() -> None:
    world = joined("decode")
    world.feed(ev.ScaleRequested(1, 1))
    assert world.replica("b.r0").state is S.SHUTTING_NULL or world.replica("r1").state is (
        S.SHUTTING_NULL
    )
    warm = "b.r0" if world.replica("b.r0").state is S.SHUTTING_NULL else "r1"
    if warm == "r1":
        world.feed(ev.RemoveRequested("b.r0"))
        warm = "b.r0"
    world.feed(ev.ScaleRequested(1, 1))
    assert world.replica(warm).state is S.SHUTTING_NULL
    reboot(world)
    join(world, "decode")
    assert names(find(world, warm)) == ["WorkerAdopted"]
    assert world.replica(warm).state is S.SHUTTING_NULL
    world.feed(ev.ScaleRequested(1, 2))
    assert world.replica(warm).state is S.DECODE


@pytest.mark.parametrize("new", ["r0", "b.r1"])
def test_old_of_a_live_pair_is_awaited_as_the_prefill_that_it_is(new: str) -> None:
    """What the hub expects of a node is what the core awaits; else the agent is told to end a
    worker that the core waits for without end."""
    world = Harness(ladder_map=0).serving("spare", "decode", "prefill")
    join(world, "prefill", "spare")
    world.attach("b.r0", pid=500)
    world.load("b.r0")
    world.attach("b.r1", pid=501)
    only(world.feed(ev.LivePairRequested(new, "b.r0")), ev.PairOpened)
    assert world.replica("b.r0").state is S.OLD_PREFILL
    expected = {r.id for r in awaited(world.state)}
    assert "b.r0" in expected
    world.boot("spare", "decode", "prefill", adopted=(("r1", 1, 100), ("r2", 1, 100)))
    assert world.state.pairs == {}
    assert (world.replica("b.r0").state, world.replica("b.r0").worker) == (S.FAILED, "awaited")
    assert {r.id for r in world.state.replicas.values() if r.worker == "awaited"} == expected
    join(world, "prefill", "spare", epoch=2)
    find(world, "b.r0")
    assert world.replica("b.r0").state is S.PREFILL


def test_one_in_the_middle_of_a_load_is_ended_and_started_anew() -> None:
    world = Harness().serving("prefill", "decode")
    join(world, "decode")
    world.attach("b.r0", pid=500)
    assert world.replica("b.r0").state is S.LOADING_DECODE
    assert awaited(world.state) == []
    reboot(world)
    assert world.commanded(EndWorker) == [EndWorker("b.r0", 1)]
    assert "b.r0" not in world.state.replicas
    join(world, "decode")
    assert world.commanded(SpawnWorker) == [SpawnWorker("b.r0", 2, "b")]


def test_one_that_did_not_survive_is_replaced() -> None:
    world = joined("decode")
    reboot(world)
    join(world, "decode")
    world.feed(ev.WorkerExited("b.r0", 1, "not there any more when the controller was back"))
    assert world.commanded(SpawnWorker) == [SpawnWorker("b.r0", 2, "b")]


def test_a_node_that_does_not_come_back_in_time_is_lost() -> None:
    world = joined("decode")
    reboot(world)
    events = world.feed(ev.AgentLost("b", 1, "not back 10 s after the controller's restart"))
    assert only(events, ev.NodeLost).reason.startswith("not back")
    assert set(world.state.replicas) == {"r0", "r1"}
    # Its agent may have it still; it was told not to keep it.
    [ignored] = find(world, "b.r0")
    assert isinstance(ignored, ev.StaleNoticeIgnored)
    assert world.commanded(EndWorker) == [EndWorker("b.r0", 1)]
    join(world, "decode", epoch=2)
    assert world.commanded(SpawnWorker) == [SpawnWorker("b.r0", 2, "b")]


def test_a_notice_that_comes_twice_ends_nobody() -> None:
    world = joined("decode")
    reboot(world)
    join(world, "decode")
    find(world, "b.r0")
    assert names(find(world, "b.r0")) == ["StaleNoticeIgnored"]
    assert world.commanded(EndWorker) == []
    assert world.replica("b.r0").state is S.DECODE


def test_a_controller_that_is_restarted_twice_still_awaits_them() -> None:
    world = joined("decode")
    reboot(world)
    assert "WorkerAwaited" not in names(reboot(world, boot_epoch=3))
    join(world, "decode")
    find(world, "b.r0")
    assert (world.replica("b.r0").state, world.replica("b.r0").epoch) == (S.DECODE, 1)


def test_a_node_with_another_offer_begins_anew() -> None:
    world = joined("decode")
    reboot(world)
    events = join(world, "prefill", epoch=2)
    assert only(events, ev.NodeLost).reason == "it came back with another configuration"
    assert world.commanded(EndWorker) == [EndWorker("b.r0", 1)]
    assert world.commanded(SpawnWorker) == [SpawnWorker("b.r0", 2, "b")]
    assert world.replica("b.r0").role == "prefill"


@pytest.mark.parametrize("when", ["before", "while awaited"])
def test_a_restart_that_was_asked_for_is_done(when: str) -> None:
    world = joined("decode")
    if when == "before":
        world.feed(ev.RestartRequested("b.r0", 0))
    reboot(world)
    if when == "before":
        assert "b.r0" not in world.state.replicas  # its worker was to be replaced anyway
        join(world, "decode")
    else:
        world.feed(ev.RestartRequested("b.r0", 0))
        join(world, "decode")
        find(world, "b.r0")
        world.feed(ev.WorkerExited("b.r0", 1, "exited with status 0"))
    assert world.commanded(SpawnWorker) == [SpawnWorker("b.r0", 2, "b")]


def test_a_drained_one_stays_drained() -> None:
    world = joined("decode")
    world.feed(ev.DrainRequested("b.r0", 0))
    assert world.replica("b.r0").state is S.SHUTTING_NULL
    reboot(world)
    join(world, "decode")
    find(world, "b.r0")
    assert (world.replica("b.r0").state, world.replica("b.r0").cordoned) == (S.SHUTTING_NULL, 1)
    world.feed(ev.UndrainRequested("b.r0"))
    assert world.replica("b.r0").state is S.DECODE


def test_another_role_that_was_asked_for_meanwhile_is_taken() -> None:
    world = joined("decode")
    reboot(world)
    world.feed(ev.RoleRequested("b.r0", "prefill"))
    join(world, "decode")
    find(world, "b.r0")
    assert world.replica("b.r0").state is S.PREFILL
    world.arrive(1)
    assert len(world.commanded(StartPrefill)) == 1


def test_the_wait_survives_snapshots_and_replay() -> None:
    world = joined("decode", "spare")
    reboot(world)
    assert ClusterState.decode(world.state.encode()).hash() == world.state.hash()
    join(world, "decode", "spare")
    find(world, "b.r0")
    find(world, "b.r1", digest="")
    assert refold(world.log).hash() == world.state.hash()
    assert ClusterState.decode(world.state.encode()).hash() == world.state.hash()
