"""Why a decision came out as it did."""

from pathlib import Path

import pytest

from blitzd.control.core import CORE_VERSION
from blitzd.control.explain import Explainer, Explanation
from blitzd.control.explain_rules import RULES
from blitzd.events import LogReader, types as ev
from blitzd.events.record import REGISTRY, Record
from blitzd.fsm import ClusterState
from tests.control.harness import Harness
from tests.corpus import corpus, current, expected_of


def explain(log: list[Record], seq: int) -> Explanation:
    explainer = Explainer(seq, ClusterState())
    for record in log:
        if not explainer.see(record):
            break
    found = explainer.finish()
    assert found is not None
    return found


def explain_last(world: Harness, kind: type[ev.Payload]) -> Explanation:
    seq = [record.seq for record in world.log if type(record.payload) is kind][-1]
    return explain(world.log, seq)


def test_each_type_of_record_has_its_rule() -> None:
    ours = {cls for type_id, cls in REGISTRY.items() if type_id < 1000}
    assert set(RULES) == ours


@pytest.mark.parametrize(
    "log",
    [log for log in corpus() if expected_of(log).core_version == CORE_VERSION],
    ids=lambda path: path.name,
)
def test_the_chosen_one_is_the_one_that_the_facts_choose(log: Path) -> None:
    """A chaos run's every placement, explained from the state before it."""
    records = list(LogReader(log).records())
    order = {
        ev.PrefillStarted: "prompt_tokens_granted",
        ev.MigrationStarted: "blocks_in_use",
    }
    placed = [record for record in records if type(record.payload) in order]
    assert placed
    for record in placed:
        found = explain(records, record.seq)
        [chosen] = [c for c in found.candidates if c.chosen]
        could = [c for c in found.candidates if not c.refusal]
        load = order[type(record.payload)]
        first = min(could, key=lambda c: (c.facts["lost"], c.facts[load], c.replica))
        assert chosen == first, record
        assert found.cause is not None
        assert found.cause["kind"] == "input"


def test_every_record_of_a_log_can_be_explained() -> None:
    records = list(LogReader(current("pairs")).records())
    for record in records:
        found = explain(records, record.seq)
        assert found.record["seq"] == record.seq
        assert (found.cause is None) == (record.cause == 0)
        assert record.seq in [step["seq"] for step in found.turn]


def test_facts_are_those_right_before_the_event() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1, prompt=100)
    found = explain_last(world, ev.PrefillStarted)
    assert found.facts["request"]["state"] == "queued"
    [chosen] = [c for c in found.candidates if c.chosen]
    assert chosen.facts["blocks_free"] == 64
    [other] = [c for c in found.candidates if not c.chosen]
    assert other.refusal == "it is Decode and is given no prompts"


def test_who_waits_hears_why_nobody_takes_it() -> None:
    world = Harness(max_prefills_per_replica=1).serving("prefill", "prefill", "decode")
    for request_id in (1, 2, 3):
        world.arrive(request_id)
    found = explain_last(world, ev.RequestAccepted)
    refusals = {c.replica: c.refusal for c in found.candidates}
    assert refusals == {
        "r0": "it has 1 prefills, the limit",
        "r1": "it has 1 prefills, the limit",
        "r2": "it is Decode and is given no prompts",
    }
    assert not any(c.chosen for c in found.candidates)


def test_a_prefilled_one_without_room_hears_how_much_is_missing() -> None:
    world = Harness().serving("prefill", "decode", blocks=3)
    for request_id in (1, 2):
        world.arrive(request_id, prompt=60, max_tokens=70)
        world.first_token(request_id)
    found = explain_last(world, ev.PrefillFinished)
    refusals = {c.replica: c.refusal for c in found.candidates}
    assert refusals["r1"] == "3 blocks are needed, 0 are free"


def test_a_refused_command_shows_the_state_that_it_met() -> None:
    world = Harness().serving("prefill", "decode")
    world.feed(ev.DeactivateRequested("r0"))
    found = explain_last(world, ev.CommandRefused)
    assert found.facts["replicas"]["r0"]["state"] == "Prefill"
    assert found.facts["replicas"]["r0"]["takes"] == ["lose", "mutate", "pair_old", "shut"]
    assert found.cause is not None
    assert found.cause["type"] == "DeactivateRequested"


def test_a_refused_scale_shows_what_there_is() -> None:
    world = Harness().serving("prefill", "decode", "spare")
    world.feed(ev.ScaleRequested(9, 9))
    found = explain_last(world, ev.CommandRefused)
    assert found.facts["scale"]["there"] == {"decode": 1, "prefill": 1, "spare": 1}


def test_a_scale_step_shows_who_could_have_been_taken() -> None:
    world = Harness().serving("prefill", "prefill", "decode")
    world.arrive(1)
    world.feed(ev.ScaleRequested(1, 2))
    found = explain_last(world, ev.MutationStarted)
    busy, idle = "r0", "r1"
    by_replica = {c.replica: c for c in found.candidates}
    assert by_replica[idle].chosen
    assert (by_replica[busy].refusal, by_replica[busy].facts["blocks_reserved"]) == ("", 2)
    assert by_replica["r2"].refusal
    assert found.facts["scale"] == {
        "wanted": {"prefill": 1, "decode": 2},
        "there": {"decode": 1, "prefill": 2},
    }


def test_a_rejected_request_shows_the_limits_it_met() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1, prompt=100_000)
    found = explain_last(world, ev.RequestRejected)
    assert found.facts["queued"] == 0
    assert found.facts["room_tokens"] == {"prefill": {"r0": 4096}, "decode": {"r1": 4096}}
    assert found.facts["policy"] == {"max_queued_requests": 256}


def test_an_ended_lease_shows_its_age() -> None:
    world = Harness(lease_ttl_ms=500).serving("prefill", "decode")
    world.arrive(1)
    world.first_token(1)
    world.after(501)
    found = explain_last(world, ev.MigrationFailed)
    assert found.facts["lease"]["age_ms"] == 501
    assert found.facts["lease"]["left_ms"] == -1
    assert found.facts["policy"]["lease_ttl_ms"] == 500


def test_a_sequence_that_does_not_come_has_no_explanation() -> None:
    explainer = Explainer(99, ClusterState())
    for record in Harness().serving("prefill").log:
        assert explainer.see(record)
    assert explainer.finish() is None
