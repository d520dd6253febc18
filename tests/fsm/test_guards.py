"""What the fold refuses whatever was decided: the last line before a wrong state."""

import pytest

from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm import ClusterState, IllegalEvent, IllegalTransition, ReplicaState, fold
from blitzd.fsm.table import ACCEPTS_KV, ACCEPTS_PROMPTS
from tests.control.harness import Harness


def refused(state: ClusterState, event: Payload) -> str:
    """The refusal; fails if there is none, or if it changed anything."""
    before = (state.encode(), state.hash())
    with pytest.raises((IllegalEvent, IllegalTransition)) as refusal:
        fold(state, Record(state.seq + 1, 0, state.mono_ns, 0, event))
    assert (state.encode(), state.hash()) == before
    return str(refusal.value)


def waiting() -> ClusterState:
    """r0 Prefill with request 1 prefilled and without a lease, 2 queued; r1 Decode is full."""
    world = Harness(max_prefills_per_replica=1).serving("prefill", "decode", blocks=2)
    world.arrive(1, prompt=60, max_tokens=60)
    world.first_token(1)
    world.arrive(2, prompt=60, max_tokens=60)
    world.first_token(2)
    world.arrive(3, prompt=10, max_tokens=60)
    state = world.state
    assert state.requests[2].state == "migrating"
    assert not state.requests[2].lease_id
    return state


def queued() -> ClusterState:
    world = Harness(max_prefills_per_replica=1).serving("prefill", "decode")
    world.arrive(1)
    world.arrive(2)
    assert world.request_state(2) == "queued"
    return world.state


@pytest.mark.parametrize("state_of_it", sorted(set(ReplicaState) - ACCEPTS_PROMPTS))
def test_prompts_enter_only_what_accepts_prompts(state_of_it: ReplicaState) -> None:
    state = queued()
    state.replicas["r1"].state = state_of_it
    assert "accepts no prompts" in refused(state, ev.PrefillStarted(2, "r1", 1, 2))


@pytest.mark.parametrize("state_of_it", sorted(set(ReplicaState) - ACCEPTS_KV))
def test_kv_enters_only_what_accepts_kv(state_of_it: ReplicaState) -> None:
    state = waiting()
    state.replicas["r1"].state = state_of_it
    lease = state.node.next_lease
    event = ev.MigrationStarted(lease, 2, "r0", 1, "r1", 1, 1, 10**12)
    assert "accepts no KV" in refused(state, event)


def test_leases_are_numbered_and_lead_elsewhere() -> None:
    state = waiting()
    lease = state.node.next_lease
    later = ev.MigrationStarted(lease + 1, 2, "r0", 1, "r1", 1, 1, 10**12)
    assert "out of order" in refused(state, later)
    itself = ev.MigrationStarted(lease, 2, "r0", 1, "r0", 1, 1, 10**12)
    assert "to itself" in refused(state, itself)


def test_a_second_lease_of_a_request_is_refused() -> None:
    state = waiting()
    event = ev.MigrationStarted(state.node.next_lease, 1, "r0", 1, "r1", 1, 1, 10**12)
    assert "takes no KV lease" in refused(state, event)


def test_nothing_with_requests_is_called_empty() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.feed(ev.DrainRequested("r0", 0))
    assert world.replica("r0").state is ReplicaState.SHUTTING_PREFILL
    assert "still has 1 requests" in refused(world.state, ev.ReplicaEmptied("r0", 1))


def test_a_decode_with_requests_does_not_expire() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    assert "still has 1 requests" in refused(world.state, ev.ReplicaExpired("r1", 1, "scale"))


def test_a_decode_with_requests_does_not_become_prefill() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    world.feed(ev.RoleRequested("r1", "prefill"))
    assert world.replica("r1").state is ReplicaState.AUS_PREFILL
    assert "still has 1 requests" in refused(world.state, ev.PrefillOpened("r1", 1))


def test_a_mutation_leaves_no_request_behind() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    world.arrive(1)
    world.feed(ev.RoleRequested("r0", "decode"))
    assert world.replica("r0").state is ReplicaState.MUTATING_TO_DECODE
    assert "not flushed" in refused(world.state, ev.MutationFinished("r0", 1, ()))
    assert "its KV is not whole" in refused(world.state, ev.MutationFinished("r0", 1, (1,)))


def test_pairs_are_numbered_and_of_two() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    next_pair = world.state.node.next_pair
    later = ev.PairOpened(next_pair + 1, "r2", 1, "r0", 1, 4, "map")
    assert "out of order" in refused(world.state, later)
    itself = ev.PairOpened(next_pair, "r2", 1, "r2", 1, 4, "map")
    assert "out of order" in refused(world.state, itself)
    wrong_old = ev.PairOpened(next_pair, "r2", 1, "r1", 1, 4, "map")
    assert "pair_old" in refused(world.state, wrong_old)


def test_an_epoch_is_used_once_and_in_order() -> None:
    world = Harness().serving("prefill", "decode")
    assert "cannot spawn" in refused(world.state, ev.WorkerSpawning("r0", 2))
    world.state.replicas["r0"].worker = "absent"
    for epoch in (0, 1, 3):
        assert "cannot spawn" in refused(world.state, ev.WorkerSpawning("r0", epoch))


def test_a_serving_replica_s_role_is_its_state_s() -> None:
    state = Harness().serving("prefill", "decode").state
    assert "its role is its state's" in refused(state, ev.RoleAssigned("r0", "decode"))
