"""Defects of the original that concern state (reference 15.2 to 15.5), by their names there.

Each test asserts what is right, and fails on what the original does.
"""

import pytest

from blitzd.control.commands import LoadModel, SpawnWorker
from blitzd.events import types as ev
from tests.control.harness import MS, Harness, ReplicaState, RequestState, only


def reserved(world: Harness) -> dict[str, int]:
    return {r: world.state.blocks_reserved(r) for r in world.state.replicas}


def decoding(*replicas: str, requests: int = 1, **policy: int) -> Harness:
    world = Harness(**policy).serving(*replicas)
    for request_id in range(1, requests + 1):
        world.arrive(request_id)
        world.first_token(request_id)
        world.imported(request_id)
    return world


# 15.2: accounting.


def test_a1_blocks_come_back_however_a_request_ends() -> None:
    for end in (
        lambda world: world.ended(1),
        lambda world: world.feed(ev.ClientLeft(1)),
        lambda world: world.feed(ev.RequestErrored("r1", 1, 1, "NaN")),
        lambda world: world.feed(ev.WorkerExited("r1", 1, "killed")),
        lambda world: world.feed(ev.RequestErrored("r1", 1, 1, "step failed", lost=1)),
    ):
        world = decoding("prefill", "decode")
        assert reserved(world)["r1"] > 0
        end(world)
        assert reserved(world)["r1"] == 0
        # What is left is where the request goes on, if it does.
        assert reserved(world)["r0"] == sum(r.source_blocks for r in world.state.requests.values())


def test_a2_a_client_that_leaves_the_queue_takes_its_tokens_along() -> None:
    world = Harness()
    world.boot("prefill", "decode")
    world.arrive(1, prompt=100)
    world.arrive(2, prompt=30)
    world.feed(ev.ClientLeft(1))
    assert world.state.to_json()["queue"] == {"requests": 1, "tokens": 30}


def test_a3_room_is_not_reserved_for_all_that_a_request_may_ever_say() -> None:
    world = Harness(decode_reserve_tokens=256).serving("prefill", "decode", blocks=200)
    world.arrive(1, prompt=64, max_tokens=8000)
    assert reserved(world)["r0"] == 2, "the prompt and one token"
    world.first_token(1)
    assert reserved(world)["r1"] == 5, "the prompt and 256 tokens"


def test_a4_blocks_are_reserved_once_and_before_anything_moves() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    before = reserved(world)
    started = only(world.first_token(1), ev.MigrationStarted)
    assert reserved(world) == before | {"r1": started.blocks}
    world.imported(1)
    assert reserved(world) == {"r0": 0, "r1": started.blocks}


def test_a5_kv_on_a_shutting_decode_counts() -> None:
    world = decoding("prefill", "decode", "decode")
    world.feed(ev.DrainRequested("r1", 0))
    assert world.replica("r1").state is ReplicaState.SHUTTING_DECODE
    assert reserved(world)["r1"] > 0


def test_a6_odd_lengths_leave_no_block_behind() -> None:
    world = Harness().serving("prefill", "decode")
    for request_id, prompt in enumerate((1, 63, 64, 65, 127, 129), start=1):
        world.arrive(request_id, prompt=prompt, max_tokens=prompt)
        if world.request_state(request_id) is RequestState.PREFILLING and prompt > 1:
            world.first_token(request_id)
            world.imported(request_id)
        world.ended(request_id)
    assert set(reserved(world).values()) == {0}


def test_a9_one_request_that_never_fits_does_not_block_the_queue() -> None:
    world = Harness().serving("prefill", "decode", blocks=2)
    assert only(world.arrive(1, prompt=500), ev.RequestRejected).code == "too_long"
    world.arrive(2, prompt=10, max_tokens=10)
    assert world.request_state(2) is RequestState.PREFILLING


# 15.3: what a plan may count on.


def test_p4_scaling_down_by_more_than_one_does_not_wrap() -> None:
    world = Harness().serving("prefill", "decode", "decode", "decode", "decode")
    world.feed(ev.ScaleRequested(1, 1))
    states = [r.state for r in world.state.replicas.values()]
    assert states.count(ReplicaState.DECODE) == 1
    assert states.count(ReplicaState.SHUTTING_NULL) == 3


def test_p7_one_rule_says_how_many_are_shut() -> None:
    world = Harness().serving("prefill", "prefill", "prefill", "decode")
    events = world.feed(ev.ScaleRequested(1, 1))
    assert sum(isinstance(e, ev.ShutdownStarted) for e in events) == 2
    world.after(ms=50)
    assert world.after(ms=50) == []


def test_p8_the_only_one_that_serves_is_not_shut_because_another_loads() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.ScaleRequested(2, 1))
    assert world.replica("r2").state is ReplicaState.LOADING_PREFILL
    world.feed(ev.ScaleRequested(1, 1))
    assert world.replica("r0").state is ReplicaState.PREFILL
    world.load("r2")
    serving = [r for r in world.state.replicas.values() if r.state is ReplicaState.PREFILL]
    assert len(serving) == 1


def test_p9_a_warm_spare_keeps_its_time_when_a_plan_goes_down() -> None:
    world = Harness().serving("prefill", "prefill", "prefill", "decode")
    world.feed(ev.ScaleRequested(2, 1))
    [spare] = [r for r in world.state.replicas.values() if r.state is ReplicaState.SHUTTING_NULL]
    world.feed(ev.ScaleRequested(1, 1))
    assert spare.state is ReplicaState.SHUTTING_NULL
    nulls = [r for r in world.state.replicas.values() if r.state is ReplicaState.SHUTTING_NULL]
    assert len(nulls) == 2


# 15.4: what an executor may do.


def test_e1_decode_alone_is_scaled_up_like_prefill() -> None:
    for counts, loading in (((1, 2), "LoadingDecode"), ((2, 1), "LoadingPrefill")):
        world = Harness().serving("prefill", "decode", "spare")
        world.feed(ev.ScaleRequested(*counts))
        assert world.replica("r2").state == loading
        assert world.commanded(LoadModel) == [LoadModel("r2", 1)]


def test_e2_a_decode_is_shut_only_as_far_as_the_plan_says() -> None:
    world = decoding("prefill", "decode", "decode", "spare")
    world.feed(ev.ScaleRequested(2, 2))
    assert [world.replica(r).state for r in ("r1", "r2")] == [ReplicaState.DECODE] * 2


def test_e6_what_a_plan_takes_is_taken_in_the_event_that_decides() -> None:
    world = Harness().serving("prefill", "decode", "spare", "spare")
    world.feed(ev.ScaleRequested(2, 1))
    first = world.replica("r2").state
    events = world.feed(ev.ScaleRequested(2, 2))
    assert first is ReplicaState.LOADING_PREFILL
    assert only(events, ev.LoadStarted).replica == "r3"


def test_e7_a_replica_serves_in_the_event_that_says_its_weights_are_there() -> None:
    world = Harness()
    world.boot("prefill", "decode")
    world.attach("r0")
    world.arrive(1)
    events = world.load("r0")
    kinds = [type(e) for e in events]
    assert kinds.index(ev.LoadFinished) < kinds.index(ev.PrefillStarted)
    replica = world.replica("r0")
    assert replica.digest
    assert replica.layers_ready == replica.layers_total > 0


def test_e9_going_live_without_a_partner_is_refused_by_name() -> None:
    world = Harness().serving("decode", "decode", "spare")
    refused = only(world.feed(ev.LivePairRequested("r2", "r0")), ev.CommandRefused)
    assert "Decode" in refused.reason


def test_e13_who_is_paired_with_whom_is_in_the_log() -> None:
    world = Harness().serving("prefill", "prefill", "decode", "spare", "spare")
    world.feed(ev.LivePairRequested("r3", "r0"))
    world.feed(ev.LivePairRequested("r4", "r1"))
    pairs = {(p.new, p.old) for p in world.state.pairs.values()}
    assert pairs == {("r3", "r0"), ("r4", "r1")}
    world.load("r3")
    assert world.replica("r0").state is ReplicaState.PREFILL
    assert world.replica("r1").state is ReplicaState.OLD_PREFILL, "the other pair is its own"


# 15.5: concurrency and failure.


def test_one_dead_worker_takes_nobody_else_along() -> None:
    world = decoding("prefill", "decode", "decode", requests=2)
    on = {request_id: world.state.requests[request_id].target for request_id in (1, 2)}
    world.feed(ev.WorkerExited(on[1], 1, "killed"))
    assert world.request_state(1) is RequestState.PREFILLING
    assert world.request_state(2) is RequestState.DECODING
    assert world.commanded(SpawnWorker) == [SpawnWorker(on[1], 2)]


def test_a_mutation_does_not_hang_behind_a_migration_that_finds_no_room() -> None:
    world = Harness().serving("prefill", "prefill", "decode", blocks=4)
    world.arrive(1, prompt=100, max_tokens=100)
    world.first_token(1)
    world.imported(1)
    world.arrive(2, prompt=100, max_tokens=100)
    world.first_token(2)
    assert world.state.requests[2].lease_id == 0, "the only decode replica is full"
    source = world.state.requests[2].source
    only(world.feed(ev.RoleRequested(source, "decode")), ev.MutationFinished)
    assert world.request_state(2) is RequestState.DECODING


def test_a_transfer_whose_source_dies_frees_its_target() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    world.feed(ev.WorkerExited(world.state.requests[1].source, 1, "killed"))
    assert not world.state.leases
    assert reserved(world)["r2"] == 0
    world.arrive(2)
    world.first_token(2)
    assert world.state.requests[2].target == "r2"


@pytest.mark.parametrize("deaths", [("r0",), ("r2",), ("r0", "r2"), ("r2", "r0")])
def test_no_replica_stays_old_for_ever(deaths: tuple[str, ...]) -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))
    for dead in deaths:
        world.feed(ev.WorkerExited(dead, world.replica(dead).epoch, "killed"))
    for replica_id in ("r0", "r2"):
        if world.replica(replica_id).state is ReplicaState.NEW_PREFILL:
            world.load(replica_id)
    assert not world.state.pairs
    assert not [r for r in world.state.replicas.values() if r.state is ReplicaState.OLD_PREFILL]


def test_low_indices_do_not_get_all_the_kv() -> None:
    world = decoding("prefill", "decode", "decode", "decode", requests=6)
    targets = [r.target for r in world.state.requests.values()]
    assert sorted(targets) == ["r1", "r1", "r2", "r2", "r3", "r3"]


def test_a_lease_nobody_answers_for_is_not_held_for_ever() -> None:
    world = Harness(lease_ttl_ms=1000).serving("prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    world.after(ms=1000)
    assert not world.state.leases
    assert set(reserved(world).values()) == {0}


def test_an_idle_state_is_left_alone() -> None:
    """Where the original spins, nothing happens: no event, no command."""
    world = Harness().serving("prefill", "decode", "spare")
    length = len(world.log)
    for _ in range(100):
        world.now += 50 * MS
        assert world.feed(ev.Ticked()) == []
        assert world.commands == []
    assert len(world.log) == length
