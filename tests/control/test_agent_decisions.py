"""Nodes that join and are lost."""

import pytest

from blitzd.control.commands import EndWorker, SpawnWorker
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm import ClusterState
from tests.control.harness import Harness, RequestState, only, refold


def join(world: Harness, *roles: str, epoch: int = 1) -> list[Payload]:
    replicas = tuple((f"b.r{i}", role) for i, role in enumerate(roles))
    return world.feed(ev.AgentJoined("b", epoch, "10.0.0.2", "test", "x86_64", 2, 1024, replicas))


def joined(*roles: str, **policy: int) -> Harness:
    world = Harness(**policy).serving("prefill", "decode")
    join(world, *roles)
    for replica_id in [r.id for r in world.state.replicas.values() if r.node == "b"]:
        world.attach(replica_id, pid=500)
        if world.replica(replica_id).role != "spare":
            world.load(replica_id)
    return world


def test_a_node_that_joins_brings_its_replicas_and_its_agent_starts_their_workers() -> None:
    world = Harness().serving("prefill", "decode")
    events = join(world, "decode", "spare")
    assert [type(event).__name__ for event in events] == [
        "NodeJoined",
        "ReplicaRegistered",
        "ReplicaRegistered",
        "WorkerSpawning",
        "WorkerSpawning",
    ]
    assert world.commanded(SpawnWorker) == [
        SpawnWorker("b.r0", 1, "b"),
        SpawnWorker("b.r1", 1, "b"),
    ]
    assert world.replica("b.r0").node == "b"
    [shown] = world.state.to_json()["agents"]
    assert (shown["node"], shown["phase"], shown["cpus"]) == ("b", "present", 2)


def test_own_workers_are_started_here() -> None:
    world = Harness()
    world.boot("prefill")
    assert world.commanded(SpawnWorker) == [SpawnWorker("r0", 1, "")]


def test_requests_leave_a_lost_node_and_are_served_on() -> None:
    world = joined("decode")
    world.feed(ev.DrainRequested("r1", world.now + 10**9))
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    assert world.state.requests[1].target == "b.r0"
    world.feed(ev.UndrainRequested("r1"))
    world.sent[1] = 3
    events = world.feed(ev.AgentLost("b", 1, "not heard of for 10 s"))
    resumed = only(events, ev.RequestResumed)
    assert (resumed.replica, resumed.cause) == ("b.r0", "worker_lost")
    assert "node b: not heard of for 10 s" in resumed.reason
    assert world.commanded(EndWorker) == [EndWorker("b.r0", 1)]
    assert "b.r0" not in world.state.replicas
    world.first_token(1)
    world.imported(1)
    assert world.state.requests[1].target == "r1"
    assert world.request_state(1) is RequestState.DECODING
    world.ended(1)


def test_a_replica_that_comes_back_never_has_an_identity_that_was_used() -> None:
    world = joined("decode", "spare")
    world.feed(ev.WorkerExited("b.r1", 1, "killed"))
    highest = max(r.epoch for r in world.state.replicas.values() if r.node == "b")
    assert highest == 2
    world.feed(ev.AgentLost("b", 1, "not heard of for 10 s"))
    join(world, "decode", "spare", epoch=2)
    assert {c.epoch for c in world.commanded(SpawnWorker)} == {highest + 1}
    # What the lost ones still say is counted and changes nothing.
    [ignored] = world.feed(ev.LoadEnded("b.r0", 1, "digest", "map", 30, 1000, 64, 64))
    assert isinstance(ignored, ev.StaleNoticeIgnored)


def test_an_agent_that_was_restarted_within_its_lease_keeps_its_replicas() -> None:
    world = joined("decode")
    before = world.replica("b.r0").epoch
    events = join(world, "decode", epoch=2)
    assert [type(event).__name__ for event in events] == ["NodeJoined"]
    assert world.replica("b.r0").epoch == before
    assert world.commanded(SpawnWorker) == []
    # The loss of the agent before is none of the present one's.
    assert isinstance(world.feed(ev.AgentLost("b", 1, "late"))[0], ev.StaleNoticeIgnored)
    assert "b.r0" in world.state.replicas


def test_nobody_joins_a_node_that_stops() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.feed(ev.StopRequested("SIGTERM", world.now + 10**9))
    assert join(world, "decode") == []


def test_nodes_survive_snapshots_and_replay() -> None:
    world = joined("decode", "spare")
    world.feed(ev.AgentLost("b", 1, "gone"))
    assert refold(world.log).hash() == world.state.hash()
    again = ClusterState.decode(world.state.encode())
    assert again.hash() == world.state.hash()
    assert again.agents["b"].epoch_floor == 1
    assert again.agents["b"].trouble == "gone"


def test_a_machine_that_went_dark_costs_nobody_who_was_connected_to_it() -> None:
    """Nothing ends those connections: the worker that has them leaks nothing."""
    world = joined("decode", "decode")
    holds = ev.HoldingsReported("r0", 1, 0, (), (), 0, 0, ("b.r0/1", "r1/1"))
    world.feed(ev.AgentLost("b", 1, "not heard of for 10 s"))
    world.feed(holds)
    assert world.replica("r0").dirty_ns == 0
    world.after(ms=10_000)
    world.feed(holds)
    assert world.replica("r0").worker == "attached"
    # A peer on its own node is another matter.
    world.feed(ev.HoldingsReported("r0", 1, 0, (), (), 0, 0, ("r1/7",)))
    assert world.replica("r0").dirty_ns


@pytest.mark.parametrize("word", [ev.WorkerStarted, ev.WorkerDescribed])
def test_a_start_that_came_late_is_ended(
    word: type[ev.WorkerStarted] | type[ev.WorkerDescribed],
) -> None:
    """Told to a node before it was lost, and carried out after: a full disk held it up."""
    world = Harness().serving("prefill", "decode")
    join(world, "decode")
    world.feed(ev.AgentLost("b", 1, "its agent stops: SIGTERM"))
    join(world, "decode", epoch=2)
    events = world.feed(word("b.r0", 1, 500))
    assert only(events, ev.StaleNoticeIgnored).epoch == 1
    assert world.commanded(EndWorker) == [EndWorker("b.r0", 1)]
    world.feed(ev.WorkerStarted("b.r0", world.replica("b.r0").epoch, 501))
    assert world.replica("b.r0").worker == "spawned"
    assert world.commanded(EndWorker) == []
