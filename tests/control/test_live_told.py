"""What a log tells of live pairs: who could take a prompt and why not, and a request's life."""

from blitzd.events import types as ev
from blitzd.fsm import ClusterState, fold
from blitzd.fsm.story import Storyteller
from tests.control.harness import MS, Harness
from tests.control.test_explain import explain, explain_last
from tests.control.test_live_dispatch import paired


def test_a_prompt_that_waits_hears_why_neither_side_takes_it() -> None:
    world = paired("prefill", max_prefills_per_replica=4)
    for request_id in range(1, 9):
        world.arrive(request_id)
    world.after(400)
    on_new = [r.id for r in world.state.requests.values() if r.source == "r2"]
    for request_id in on_new[:2]:
        world.relayed(request_id, 5)
    world.arrive(9)
    refusals = {c.replica: c.refusal for c in explain_last(world, ev.RequestAccepted).candidates}
    assert refusals == {
        "r0": "it goes on with what r2 has, its pair",
        "r1": "it is Decode and is given no prompts",
        "r2": "it has 2 prefills, its pair's limit by now",
        "r3": "it has 4 prefills, the limit",
    }


def test_the_pair_is_among_the_facts() -> None:
    world = paired()
    world.arrive(1)
    world.relayed(1, 5)
    world.first_token(1)
    lease = explain_last(world, ev.PrefillFinished).facts["request"]
    assert (lease["source"], lease["rest"], lease["split_layer"]) == ("r2", "r0", 5)
    world.now += 250 * MS
    world.followed(1, "source")
    pair = explain_last(world, ev.FollowStopped).facts["pair"]
    assert (pair["new"], pair["old"], pair["cap"], pair["following"]) == ("r2", "r0", 3, True)


def test_every_record_of_a_pairs_life_can_be_explained() -> None:
    world = paired()
    world.arrive(1)
    world.feed(ev.RequestErrored("r2", 1, 1, "prompt_tokens: 9000 tokens"))
    for _ in range(3):
        world.followed(1, "source")
        world.after(1000)
    for record in world.log:
        assert "does not know" not in explain(world.log, record.seq).rule


def told(world: Harness, request_id: int) -> Storyteller:
    state = ClusterState()
    teller = Storyteller(request_id, state)
    for record in world.log:
        fold(state, record)
        teller.see(record)
    return teller


def test_the_story_of_a_request_that_two_replicas_shared() -> None:
    world = paired()
    world.arrive(1)
    for step in (lambda: world.relayed(1, 7), lambda: world.first_token(1)):
        world.now += 5 * MS
        step()
    world.now += 3 * MS
    world.imported(1)
    world.ended(1)
    story = told(world, 1).story
    assert [(m.event, m.since_ms, m.state) for m in story.milestones][1:5] == [
        ("PrefillStarted", 0, "prefilling"),
        ("RequestRelayed", 5, "relayed"),
        ("PrefillFinished", 10, "migrating"),
        ("MigrationStarted", 10, "migrating"),
    ]
    assert (story.phases_ms["prefilling"], story.phases_ms["relayed"]) == (5, 5)
    [hop] = story.hops
    assert (hop.source, hop.rest, hop.split_layer, hop.target) == ("r2/1", "r0/1", 7, "r1/1")
