"""Replica transitions, each reached by feeding `step` an input. Numbers are the rows of the
original's table (reference 1.3)."""

import pytest

from blitzd.control.commands import (
    DecodeLocally,
    EndWorker,
    LoadModel,
    ResetWorker,
    SpawnWorker,
    StartPrefill,
)
from blitzd.events import types as ev
from tests.control.harness import MS, Harness, ReplicaState, RequestState, only, refold


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


def test_a_worker_that_lived_long_enough_did_not_die_of_its_start() -> None:
    world = Harness()
    world.boot("spare")
    for _ in range(3):
        world.attach("r0")
        world.after(ms=60_000)
        world.feed(ev.WorkerExited("r0", world.replica("r0").epoch, "killed"))
        assert world.commanded(SpawnWorker), "restarted at once"
    assert world.state.to_json()["replicas"][0]["trouble"] == "killed"


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


def test_a_worker_that_came_up_while_the_daemon_was_away_is_attached() -> None:
    world = Harness()
    world.boot("prefill")
    world.feed(ev.WorkerStarted("r0", 1, 100))
    world.boot("prefill", adopted=(("r0", 1, 100),))
    assert world.replica("r0").state is ReplicaState.LOADING_PREFILL
    assert [type(c) for c in world.commands] == [ResetWorker, LoadModel]


def test_boot_with_fewer_replicas_retires_the_rest() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    adopted = tuple((f"r{i}", 1, 100 + i) for i in range(3))
    world.boot("prefill", "decode", adopted=adopted)
    assert list(world.state.replicas) == ["r0", "r1"]
    assert EndWorker("r2", 1) in world.commands


# Roles and lives. Rows 3 and 9 to 12 are live pairs; 13 to 27 changes of role and number;
# 28 are the manual causes.


def shut(world: Harness, replica_id: str) -> None:
    world.feed(ev.RoleRequested(replica_id, "spare"))


def null(*others: str, role: str = "prefill") -> Harness:
    """A world whose r0 is a ShuttingNull that was `role`."""
    world = Harness().serving(role, *(others or ("prefill", "decode")))
    shut(world, "r0")
    assert world.replica("r0").state is ReplicaState.SHUTTING_NULL
    return world


def paired() -> Harness:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.LivePairRequested("r2", "r0"))
    return world


def test_03_and_09_a_live_pair_opens_as_one_event() -> None:
    world = paired()
    opened = only([r.payload for r in world.log], ev.PairOpened)
    assert (opened.new, opened.old) == ("r2", "r0")
    assert world.replica("r2").state is ReplicaState.NEW_PREFILL
    assert world.replica("r0").state is ReplicaState.OLD_PREFILL
    assert world.commanded(LoadModel) == [LoadModel("r2", 1, (("r0", 1),), "nvlink", live=True)]


def test_06_a_decode_load_may_end_in_mutating_to_decode() -> None:
    world = Harness(mutate_after_load=1)
    world.boot("decode")
    world.attach("r0")
    assert [type(e) for e in world.load("r0")] == [ev.LoadFinished, ev.MutationFinished]
    after_finish = refold(world.log[:-1])
    assert after_finish.replicas["r0"].state is ReplicaState.MUTATING_TO_DECODE
    assert world.replica("r0").state is ReplicaState.DECODE


def test_08_aus_prefill_opens_when_what_it_decodes_has_ended() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    target = world.state.requests[1].target
    world.feed(ev.RoleRequested(target, "prefill"))
    assert world.replica(target).state is ReplicaState.AUS_PREFILL
    only(world.ended(1), ev.PrefillOpened)
    assert world.replica(target).state is ReplicaState.PREFILL


def test_10_a_new_prefill_with_all_layers_is_refactory() -> None:
    world = paired()
    world.moved("r2")
    world.arrive(1)
    world.load("r2")
    assert world.replica("r2").state is ReplicaState.REFACTORY_PREFILL
    assert world.replica("r0").state is ReplicaState.OLD_PREFILL


def test_11_and_12_a_drained_pair_settles_as_one_event() -> None:
    world = paired()
    world.moved("r2")
    world.arrive(1)
    world.load("r2")
    events = world.followed(1)
    assert [type(e) for e in events] == [ev.FollowStopped, ev.PairSettled]
    assert world.replica("r2").state is ReplicaState.PREFILL
    assert world.replica("r0").state is ReplicaState.PREFILL


def test_a_pair_is_not_settled_before_its_last_layer() -> None:
    """Old may hear of it from New before the daemon does."""
    world = paired()
    world.moved("r2", layers=29)
    assert [type(e) for e in world.followed(1)] == [ev.FollowStopped]
    assert world.replica("r0").state is ReplicaState.OLD_PREFILL
    only(world.load("r2"), ev.PairSettled)
    assert world.replica("r0").state is ReplicaState.PREFILL


def test_a_pair_whose_new_side_dies_or_fails_gives_the_old_side_back() -> None:
    for ended in (
        ev.WorkerExited("r2", 1, "killed"),
        ev.LoadEnded("r2", 1, "", "", 0, 0, 0, 0, "link failed"),
    ):
        world = paired()
        only(world.feed(ended), ev.PairBroken)
        assert world.replica("r0").state is ReplicaState.PREFILL
        assert not world.state.pairs


def test_a_pair_whose_old_side_dies_lets_the_new_side_come_up_alone() -> None:
    world = paired()
    only(world.feed(ev.WorkerExited("r0", 1, "killed")), ev.PairBroken)
    assert world.replica("r2").state is ReplicaState.NEW_PREFILL
    world.load("r2")
    assert world.replica("r2").state is ReplicaState.PREFILL


def test_13_and_14_a_mutation_takes_its_waiting_requests_along_without_a_transfer() -> None:
    world = Harness().serving("prefill", "prefill", "decode", blocks=8)
    world.feed(ev.WorkerExited("r2", 1, "killed"))  # nowhere to migrate to
    world.arrive(1)
    world.arrive(2)
    assert [world.state.requests[i].source for i in (1, 2)] == ["r0", "r1"]
    world.first_token(1)
    world.arrive(3)
    assert world.state.requests[3].source == "r0"
    world.feed(ev.RoleRequested("r0", "decode"))
    assert world.replica("r0").state is ReplicaState.MUTATING_TO_DECODE
    # 3 is still being computed there; nothing moves before it has its first token.
    events = world.first_token(3)
    assert only(events, ev.MutationFinished).request_ids == (1, 3)
    assert world.replica("r0").state is ReplicaState.DECODE
    assert {c.request_id for c in world.commanded(DecodeLocally)} == {1, 3}
    assert [world.state.requests[i].state for i in (1, 3)] == [RequestState.DECODING] * 2
    assert world.state.requests[1].target == "r0"
    only(world.ended(1), ev.RequestFinished)


def test_15_and_17_a_shutting_prefill_hands_its_requests_over_and_is_null() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    world.arrive(1)
    world.feed(ev.DrainRequested("r0", 0))
    assert world.replica("r0").state is ReplicaState.SHUTTING_PREFILL
    world.arrive(2)
    assert world.state.requests[2].source == "r1", "new ones go elsewhere from that event on"
    world.first_token(1)
    assert world.replica("r0").state is ReplicaState.SHUTTING_PREFILL
    only(world.imported(1), ev.ReplicaEmptied)
    assert world.replica("r0").state is ReplicaState.SHUTTING_NULL


def test_16_a_shutting_prefill_is_revived() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    world.arrive(1)
    world.feed(ev.DrainRequested("r0", 0))
    world.feed(ev.UndrainRequested("r0"))
    assert world.replica("r0").state is ReplicaState.PREFILL


def test_18_and_20_a_shutting_decode_finishes_and_is_null() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    assert world.state.requests[1].target == "r1"
    world.feed(ev.DrainRequested("r1", 0))
    assert world.replica("r1").state is ReplicaState.SHUTTING_DECODE
    world.arrive(2)
    world.first_token(2)
    assert world.state.requests[2].target == "r2"
    events = world.ended(1)
    assert [type(e) for e in events] == [ev.RequestFinished, ev.ReplicaEmptied]
    assert world.replica("r1").state is ReplicaState.SHUTTING_NULL


def test_a_lease_that_was_open_may_still_arrive_on_a_shutting_decode() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    target = world.state.requests[1].target
    world.feed(ev.DrainRequested(target, 0))
    world.imported(1)
    assert world.request_state(1) is RequestState.DECODING
    only(world.ended(1), ev.ReplicaEmptied)


def test_19_a_shutting_decode_is_revived_through_aus_decode() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    target = world.state.requests[1].target
    world.feed(ev.DrainRequested(target, 0))
    events = world.feed(ev.UndrainRequested(target))
    assert [type(e) for e in events] == [ev.ReplicaRevived, ev.DecodeOpened]
    assert world.replica(target).state is ReplicaState.DECODE


def test_21_an_idle_decode_expires_at_once_when_scaled_down() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    expired = only(world.feed(ev.ScaleRequested(1, 1)), ev.ReplicaExpired)
    assert world.replica(expired.replica).state is ReplicaState.SHUTTING_NULL


def test_22_a_null_has_its_guard_from_the_event_that_made_it() -> None:
    world = Harness().serving("prefill", "decode", "decode")
    world.feed(ev.ScaleRequested(1, 1))
    for request_id in range(1, 5):
        world.arrive(request_id)
        world.first_token(request_id)
    assert {r.target for r in world.state.requests.values()} == {"r2"}


def test_23_a_null_becomes_prefill_again() -> None:
    world = null()
    world.feed(ev.RoleRequested("r0", "prefill"))
    assert world.replica("r0").state is ReplicaState.PREFILL


def test_24_a_null_that_was_decode_becomes_decode_at_once() -> None:
    world = null("prefill", "decode", role="decode")
    events = world.feed(ev.RoleRequested("r0", "decode"))
    assert [type(e) for e in events] == [ev.NullReused]
    assert world.replica("r0").state is ReplicaState.DECODE


def test_25_a_null_that_was_prefill_becomes_decode_through_aus_decode() -> None:
    world = null()
    events = world.feed(ev.RoleRequested("r0", "decode"))
    assert [type(e) for e in events] == [ev.NullReused, ev.DecodeOpened]
    assert refold(world.log[:-1]).replicas["r0"].state is ReplicaState.AUS_DECODE
    assert world.replica("r0").state is ReplicaState.DECODE


def test_26_a_null_gives_up_its_weights_when_told() -> None:
    world = null()
    event = only(world.feed(ev.DeactivateRequested("r0")), ev.ReplicaDeactivated)
    assert event.reason == "plan"
    assert world.commanded(ResetWorker) == [ResetWorker("r0", 1, unload=True)]
    replica = world.replica("r0")
    assert (replica.state, replica.layers_ready, replica.digest) == (ReplicaState.INACTIVE, 0, "")


def test_27_a_null_gives_up_its_weights_after_its_time() -> None:
    world = null()
    world.after(ms=29_999)
    assert world.replica("r0").state is ReplicaState.SHUTTING_NULL
    assert only(world.after(ms=1), ev.ReplicaDeactivated).reason == "ttl"
    world.after(ms=60_000)
    assert world.replica("r0").state is ReplicaState.INACTIVE, "it does not come back by itself"


def test_28_manual_commands_and_what_they_lead_to() -> None:
    cases = {
        ("spare", ev.LivePairRequested("r0", "r1")): ReplicaState.NEW_PREFILL,
        ("spare", ev.RoleRequested("r0", "prefill")): ReplicaState.LOADING_PREFILL,
        ("spare", ev.RoleRequested("r0", "decode")): ReplicaState.LOADING_DECODE,
        ("spare", ev.RoleRequested("r0", "colocated")): ReplicaState.LOADING_PREFILL,
        # Idle as it is, the next state follows in the same turn.
        ("prefill", ev.RoleRequested("r0", "decode")): ReplicaState.DECODE,
        ("decode", ev.RoleRequested("r0", "prefill")): ReplicaState.PREFILL,
        ("prefill", ev.DrainRequested("r0", 0)): ReplicaState.SHUTTING_NULL,
        ("decode", ev.DrainRequested("r0", 0)): ReplicaState.SHUTTING_NULL,
    }
    for (role, command), expected in cases.items():
        world = Harness().serving(role, "prefill", "decode")
        world.feed(command)
        assert world.replica("r0").state is expected, command


def test_a_command_that_does_not_fit_is_refused_with_the_reason_and_changes_nothing() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    refusals = {
        ev.DrainRequested("r9", 0): "no such replica; there are r0, r1, r2",
        ev.DrainRequested("r2", 0): "it is Inactive and serves nothing",
        ev.RoleRequested("r0", "juggler"): (
            "role 'juggler': one of prefill, decode, colocated, spare is accepted"
        ),
        ev.RoleRequested("r0", "colocated"): (
            "it is Prefill, which does not turn into colocated now"
        ),
        ev.LivePairRequested("r0", "r1"): (
            "it is Prefill with worker attached; an inactive one can go live"
        ),
        ev.LivePairRequested("r2", "r1"): "it is Decode; a Prefill can finish for another",
        ev.DeactivateRequested("r0"): (
            "it is Prefill; only an empty one gives up its weights: drain it first"
        ),
        ev.ScaleRequested(0, 1): (
            "prefill=0, decode=1: at least 1 of each and no more than the 3 replicas together"
            " are accepted"
        ),
    }
    before = world.state.hash()
    for command, reason in refusals.items():
        [refused] = world.feed(command)
        assert isinstance(refused, ev.CommandRefused)
        assert refused.reason == reason
    assert world.state.hash() == before


def test_commands_are_idempotent() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    world.feed(ev.DrainRequested("r0", 0))
    assert world.feed(ev.DrainRequested("r0", 0)) == []
    world.feed(ev.UndrainRequested("r0"))
    assert world.feed(ev.UndrainRequested("r0")) == []
    assert world.feed(ev.RoleRequested("r0", "prefill")) == []


def test_a_drained_replica_is_not_brought_back_by_a_plan_but_by_its_operator() -> None:
    world = Harness().serving("prefill", "prefill", "decode", "spare")
    world.feed(ev.DrainRequested("r0", 0))
    world.feed(ev.ScaleRequested(2, 1))
    assert world.replica("r0").state is ReplicaState.SHUTTING_NULL
    assert world.replica("r3").state is ReplicaState.LOADING_PREFILL
    world.after(ms=30_000)
    assert world.replica("r0").state is ReplicaState.INACTIVE
    world.feed(ev.ScaleRequested(3, 1))
    assert world.replica("r0").state is ReplicaState.INACTIVE
    world.feed(ev.UndrainRequested("r0"))
    assert world.replica("r0").state is ReplicaState.LOADING_PREFILL


@pytest.mark.parametrize("others", [("decode",), ()])
def test_what_is_left_at_a_drain_deadline_goes_on_elsewhere_or_ends(others: tuple[str]) -> None:
    world = Harness().serving("prefill", "decode", *others)
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    target = world.state.requests[1].target
    world.feed(ev.DrainRequested(target, world.now + 100 * MS))
    assert world.state.to_json()["replicas"][1]["drain_deadline_ns"] == world.now + 100 * MS
    events = world.after(ms=100)
    if others:
        resumed = only(events, ev.RequestResumed)
        assert (resumed.cause, resumed.replica) == ("drain_deadline", target)
        assert world.request_state(1) is RequestState.PREFILLING
    else:
        failed = only(events, ev.RequestFailed)
        assert failed.code == "drain_deadline"
        assert failed.reason == f"replica {target} was drained and its deadline has passed"
    assert world.replica(target).state is ReplicaState.SHUTTING_NULL


def test_scaling_up_takes_the_cheapest_means_first() -> None:
    world = Harness().serving("prefill", "prefill", "prefill", "decode", "spare")
    for request_id in (1, 2):
        world.arrive(request_id)  # keep r0 and r1 busy, so that shutting one takes time
    world.feed(ev.ScaleRequested(1, 1))
    states = [world.replica(r).state for r in ("r0", "r1", "r2")]
    assert sorted(states) == [
        ReplicaState.PREFILL,
        ReplicaState.SHUTTING_NULL,
        ReplicaState.SHUTTING_PREFILL,
    ]
    # The one that is still shutting comes back first, then a warm one, then a cold one.
    means = [[type(e) for e in world.feed(ev.ScaleRequested(n, 1))][1] for n in (2, 3, 4)]
    assert means == [ev.ReplicaRevived, ev.NullReused, ev.RoleAssigned]
    assert world.replica("r4").state is ReplicaState.LOADING_PREFILL


def test_scaling_prefill_down_and_decode_up_mutates() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    events = world.feed(ev.ScaleRequested(1, 2))
    assert only(events, ev.MutationStarted).role == "decode"
    assert sorted(r.state for r in world.state.replicas.values()) == [
        ReplicaState.DECODE,
        ReplicaState.DECODE,
        ReplicaState.PREFILL,
    ]


def test_scaling_down_never_takes_one_with_work_while_an_idle_one_is_there() -> None:
    world = Harness().serving("prefill", "decode", "decode", "decode")
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    busy = world.state.requests[1].target
    world.feed(ev.ScaleRequested(1, 1))
    assert world.replica(busy).state is ReplicaState.DECODE


def test_a_colocated_replica_does_both_without_a_transfer() -> None:
    world = Harness().serving("colocated")
    world.arrive(1, max_tokens=10)
    [start] = world.commanded(StartPrefill)
    assert not start.hold
    world.feed(ev.FirstTokenProduced("r0", 1, 1, held=0))
    assert world.request_state(1) is RequestState.DECODING
    assert world.state.requests[1].target == "r0"
    only(world.ended(1), ev.RequestFinished)
    assert not world.state.requests


def test_the_misspelt_state_name_is_accepted_on_input() -> None:
    assert ReplicaState("RefractoryPrefill") is ReplicaState.REFACTORY_PREFILL
