"""Who goes live by itself: prefill replicas that get their weights from another one."""

import pytest

from blitzd.control.commands import LoadModel
from blitzd.control.presets import PresetRefused, expand
from blitzd.events import types as ev
from tests.control.harness import Harness, ReplicaState, only, refold
from tests.control.test_planner import planned, plans

S = ReplicaState
ON = {"ladder_map": 0, "ladder_nvlink": 0, "ladder_live": 1}


def kinds(events: list[ev.Payload]) -> list[tuple[str, str]]:
    """What began, and who."""
    began = {ev.PairOpened: "new", ev.LoadStarted: "replica", ev.MutationStarted: "replica"}
    found = [(event, began[type(event)]) for event in events if type(event) in began]
    return [(type(event).__name__, getattr(event, name)) for event, name in found]


def test_a_prefill_that_is_raised_goes_live_beside_the_one_that_serves() -> None:
    world = Harness(**ON).serving("prefill", "decode", "spare")
    events = world.feed(ev.ScaleRequested(2, 1))
    opened = only(events, ev.PairOpened)
    assert (opened.new, opened.old, opened.source, opened.peers, opened.rung) == (
        *("r2", "r0", "r1"),
        *((("r1", 1),), "chain"),
    )
    assert [rung for rung, _ in opened.skipped] == ["map", "nvlink", "shard"]
    assert world.commanded(LoadModel) == [LoadModel("r2", 1, (("r1", 1),), "chain", live=True)]
    assert world.state.feeding() == {"r1"}
    world.moved("r2")
    world.load("r2")
    assert {r.id for r in world.state.in_states(S.PREFILL)} == {"r0", "r2"}
    assert world.state.feeding() == set()
    assert refold(world.log).hash() == world.state.hash()


@pytest.mark.parametrize(
    "off", [{"ladder_live": 0}, {"ladder_map": 1}, {"ladder_chain": 0, "ladder_p2p": 0}]
)
def test_not_without_the_switch_nor_from_the_nodes_own_file(off: dict[str, int]) -> None:
    world = Harness(**ON | off).serving("prefill", "decode", "spare")
    events = world.feed(ev.ScaleRequested(2, 1))
    assert kinds(events) == [("LoadStarted", "r2")]


def test_a_decode_replica_does_not_go_live() -> None:
    world = Harness(**ON).serving("prefill", "decode", "spare")
    assert kinds(world.feed(ev.ScaleRequested(1, 2))) == [("LoadStarted", "r2")]


def test_of_a_chain_only_the_tail_goes_live() -> None:
    world = Harness(**ON).serving("prefill", "prefill", "decode", "spare", "spare", "spare")
    events = world.feed(ev.ScaleRequested(5, 1))
    found = kinds(events)
    assert [kind for kind, _ in found] == ["LoadStarted", "LoadStarted", "PairOpened"]
    opened = only(events, ev.PairOpened)
    assert opened.new not in {e.source for e in events if isinstance(e, ev.LoadStarted)}


def test_more_that_could_go_live_than_can_finish_for_them_load_plainly() -> None:
    world = Harness(**ON, ladder_chain=0)
    world.serving("prefill", "decode", "decode", "spare", "spare")
    found = kinds(world.feed(ev.ScaleRequested(3, 2)))
    assert found == [("PairOpened", "r3"), ("LoadStarted", "r4")]


def test_each_pair_has_its_own_old() -> None:
    world = Harness(**ON, ladder_chain=0)
    world.serving("prefill", "prefill", "decode", "decode", "spare", "spare")
    world.arrive(1)
    events = world.feed(ev.ScaleRequested(4, 2))
    pairs = {(e.new, e.old) for e in events if isinstance(e, ev.PairOpened)}
    assert pairs == {("r4", "r1"), ("r5", "r0")}, "the idler first"


def test_one_that_restarts_finishes_for_nobody() -> None:
    world = Harness(**ON).serving("prefill", "decode", "spare", "spare")
    world.feed(ev.RestartRequested("r0", 0))
    assert world.replica("r0").restart_epoch
    assert world.state.pairs == {}


def test_after_a_live_load_that_failed_the_next_is_plain() -> None:
    world = Harness(**ON).serving("prefill", "decode", "spare")
    world.feed(ev.ScaleRequested(2, 1))
    failed = ev.LoadEnded("r2", 1, "", "r1", 30, 0, 0, 0, "live: only on a CPU")
    assert kinds(world.feed(failed)) == [("LoadStarted", "r2")]


def test_a_prefill_that_died_comes_back_live_beside_another() -> None:
    world = Harness(**ON).serving("prefill", "prefill", "decode")
    world.feed(ev.WorkerExited("r0", 1, "killed"))
    world.after(1000)
    opened = only(world.attach("r0"), ev.PairOpened)
    assert (opened.new, opened.old) == ("r0", "r1")


def test_the_planner_raises_prefill_live() -> None:
    world = planned("prefill", "decode", "spare", "spare", **ON, prefill_tokens_per_s=1000)
    for request_id in range(1, 9):
        world.arrive(request_id, prompt=200)
    [plan] = plans(world.after(250))
    assert plan.prefill == "up"
    assert len(world.state.pairs) == 1
    for _ in range(20):
        assert plans(world.after(250)) == [], "what goes live counts as on its way"


# Decode by way of prefill.

SWAP = {**ON, "ladder_live_decode": 1}


def test_a_decode_replica_is_had_at_once_from_a_prefill_and_its_successor_goes_live() -> None:
    world = Harness(**SWAP).serving("prefill", "prefill", "decode", "spare")
    events = world.feed(ev.ScaleRequested(2, 2))
    assert kinds(events) == [("MutationStarted", "r0"), ("PairOpened", "r3")]
    assert only(events, ev.PairOpened).old == "r1"
    assert world.replica("r0").state is S.DECODE, "it had nothing to finish"
    world.load("r3")
    assert len(world.state.in_states(S.PREFILL)) == len(world.state.in_states(S.DECODE)) == 2
    assert kinds(world.after(1000)) == []


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        (("prefill", "decode", "spare"), (1, 2)),  # the last prefill that serves
        (("prefill", "prefill", "decode", "spare"), (2, 2)),
    ],
)
def test_but_not_the_last_prefill_nor_without_the_switch(
    roles: tuple[str, ...], wanted: tuple[int, int]
) -> None:
    last = roles.count("prefill") == 1
    world = Harness(**SWAP if last else ON).serving(*roles)
    events = world.feed(ev.ScaleRequested(*wanted))
    assert kinds(events) == [("LoadStarted", f"r{len(roles) - 1}")]


def test_a_warm_spare_is_cheaper() -> None:
    world = Harness(**SWAP).serving("prefill", "prefill", "decode", "decode", "spare")
    world.feed(ev.ScaleRequested(2, 1))
    events = world.feed(ev.ScaleRequested(2, 2))
    only(events, ev.NullReused)
    assert kinds(events) == []


def test_those_that_are_too_many_change_first_and_only_the_rest_is_replaced() -> None:
    world = Harness(**SWAP).serving(*["prefill"] * 4, "decode", "spare")
    events = world.feed(ev.ScaleRequested(3, 3))
    begun = [kind for kind, _ in kinds(events)]
    assert begun == ["MutationStarted", "MutationStarted", "PairOpened"]
    assert kinds(world.after(1)) == []


@pytest.mark.parametrize(
    ("preset", "live", "decode"),
    [
        ("live", 1, 1),
        ("impl_live", 1, 1),
        ("test_live", 1, 1),
        ("eval_fast_live_wo_nvl", 1, 1),
        ("eval_fast_wo_nvl", 0, 0),
        ("blitzd", 0, 0),
    ],
)
def test_the_presets_that_go_live(preset: str, live: int, decode: int) -> None:
    values = expand(preset)
    assert (values["ladder_live"], values["ladder_live_decode"]) == (live, decode)


def test_live_is_nothing_of_serverlessllm() -> None:
    with pytest.raises(PresetRefused, match="accepted: one of the two"):
        expand("impl_live,cache_replace")
