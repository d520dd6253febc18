"""The story of a request, told from its log."""

import pytest

from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm import ClusterState, fold
from blitzd.fsm.story import Story, Storyteller
from tests.control.harness import MS, Harness


def tell(log: list[Record], request_id: int, begin: int = 0) -> Story:
    state = ClusterState()
    for record in log[:begin]:
        fold(state, record)
    teller = Storyteller(request_id, state)
    for record in log[begin:]:
        fold(state, record)
        teller.see(record)
    return teller.story


@pytest.fixture
def world() -> Harness:
    return Harness().serving("prefill", "decode")


def lived(world: Harness) -> Harness:
    world.arrive(1, prompt=100, max_tokens=64)
    world.now += 5 * MS
    world.first_token(1)
    world.now += 3 * MS
    world.feed(ev.ImportEnded(1, 123_456, 2 * MS))
    world.now += 40 * MS
    world.ended(1)
    return world


def test_a_life_has_its_times_and_its_end(world: Harness) -> None:
    story = tell(lived(world).log, 1)
    assert (story.state, story.why, story.output_tokens) == ("finished", "stop", 5)
    assert (story.prompt_tokens, story.max_tokens) == (100, 64)
    assert [(m.event, m.since_ms, m.state) for m in story.milestones] == [
        ("RequestAccepted", 0, "queued"),
        ("PrefillStarted", 0, "prefilling"),
        ("PrefillFinished", 5, "migrating"),
        ("MigrationStarted", 5, "migrating"),
        ("MigrationFinished", 8, "decoding"),
        ("RequestFinished", 48, "finished"),
    ]
    spent = {"queued": 0, "prefilling": 5, "migrating": 3, "decoding": 40, "total": 48}
    assert story.phases_ms == spent


def test_a_hop_has_its_bytes_and_times(world: Harness) -> None:
    [hop] = tell(lived(world).log, 1).hops
    assert (hop.source, hop.target, hop.blocks) == ("r0/1", "r1/1", 3)
    assert (hop.bytes_moved, hop.transfer_ms, hop.lease_ms) == (123_456, 2, 3)
    assert hop.outcome == "arrived"


def test_the_chain_of_causes_leads_to_the_input(world: Harness) -> None:
    end, cause = tell(lived(world).log, 1).causes
    assert (end.type, cause.type, cause.kind) == ("RequestFinished", "GenerationEnded", "input")
    assert cause.payload["replica"] == "r1"


def test_each_attempt_is_a_hop_and_says_why_it_failed(world: Harness) -> None:
    world.arrive(1)
    world.first_token(1)
    world.feed(ev.ImportEnded(1, 0, 0, "no_room", "12 blocks short"))
    world.after(100)
    world.feed(ev.WorkerExited("r1", 1, "killed by SIGKILL"))
    world.attach("r1")
    world.load("r1")
    world.sent[1] = 1
    world.feed(ev.WorkerExited("r0", 1, "out of memory"))
    story = tell(world.log, 1)
    assert [(h.outcome, h.reason) for h in story.hops] == [
        ("no_room", "12 blocks short"),
        ("target", "killed by SIGKILL"),
        ("resumed", ""),
    ]
    assert story.state == "queued"
    resumed = story.milestones[-1]
    assert (resumed.event, resumed.replica) == ("RequestResumed", "r0/1")
    assert resumed.detail["output_tokens"] == 1
    assert story.causes[-1].type == "WorkerExited"


def test_one_that_is_under_way_says_where_it_is(world: Harness) -> None:
    world.arrive(1)
    story = tell(world.log, 1)
    assert (story.state, story.why) == ("prefilling", "")


def test_a_rejected_one_says_why(world: Harness) -> None:
    world.arrive(1, prompt=100_000)
    story = tell(world.log, 1)
    assert story.state == "rejected"
    assert story.why.startswith("too_long: 100000 tokens do not fit")


def test_one_that_began_before_the_log_does_keeps_its_hop(world: Harness) -> None:
    world.arrive(1)
    world.first_token(1)
    begin = len(world.log)
    world.feed(ev.ImportEnded(1, 99, 10))
    story = tell(world.log, 1, begin)
    assert story.begun_before_log
    assert story.prompt_tokens == 100
    [hop] = story.hops
    assert (hop.opened_seq, hop.bytes_moved, hop.outcome) == (0, 99, "arrived")


def test_one_that_a_role_change_settles_is_told_too(world: Harness) -> None:
    world = Harness().serving("prefill", "prefill")
    world.arrive(1)
    world.feed(ev.RoleRequested("r0", "decode"))
    world.first_token(1)
    story = tell(world.log, 1)
    assert story.milestones[-1].event == "MutationFinished"
    assert story.state == "decoding"
    assert story.hops == []


def test_time_goes_on_over_a_restart(world: Harness) -> None:
    """The core's clock begins again; the wall's difference is what is left."""
    world.arrive(1)
    log = list(world.log)
    boot = Harness()
    boot.core.state = world.state
    step = boot.core.step(
        ev.Booted(2, "test", "local", (("r0", "prefill"),), (), 1), 0, wall_ns=3 * 10**9
    )
    story = tell(log + step.records, 1)
    assert story.why.startswith("daemon_restarted")
    assert story.milestones[-1].since_ms == 3000
