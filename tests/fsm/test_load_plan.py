"""What `/admin/plan` says of loads under way: their rungs, why none before, their chains."""

from typing import Any

from blitzd.events import types as ev
from blitzd.fsm import ClusterState, fold
from blitzd.fsm.load_plan import REASONS_SINCE
from blitzd.fsm.standing import plan_json
from tests.control.harness import Harness, refold


def loading(*roles: str, **policy: int) -> Harness:
    world = Harness(ladder_map=0, ladder_nvlink=0, ladder_shard=0, **policy)
    return world.serving(*roles)


def plan(world: Harness) -> dict[str, Any]:
    return plan_json(world.state)


def test_a_load_says_by_which_rung_and_why_by_none_before() -> None:
    world = loading("prefill", "decode", "spare")
    world.feed(ev.ScaleRequested(1, 2))
    world.feed(ev.LoadMoved("r2", 1, 3, 30, 100, 1000, "r1"))
    [load] = plan(world)["loads"]
    assert load.pop("seq") == world.replica("r2").since_seq
    assert load == {
        "replica": "r2",
        "role": "decode",
        "rung": "chain",
        "why_not": {
            "map": "off: ladder_map is 0",
            "nvlink": "off: ladder_nvlink is 0",
            "shard": "off: ladder_shard is 0",
        },
        "source": "r1",
        "peers": ["r1/1"],
        "shards": [],
        "layers_ready": 3,
        "layers_total": 30,
    }
    world.load("r2")
    assert plan(world)["loads"] == plan(world)["chains"] == []
    replica = world.replica("r2")
    assert (replica.rung, replica.skipped) == ("", ())
    assert refold(world.log).hash() == world.state.hash()


def test_chains_are_told_in_the_order_in_which_the_bytes_pass() -> None:
    world = loading("prefill", "decode", "decode", *["spare"] * 3)
    world.feed(ev.ScaleRequested(1, 5))
    assert plan(world)["chains"] == [{"source": "r1", "targets": ["r3", "r4", "r5"]}]
    # A middle dies: who came after it turns to the source.
    world.feed(ev.WorkerExited("r4", 1, "killed"))
    world.feed(ev.LoadMoved("r5", 1, 3, 30, 100, 1000, "r1"))
    assert plan(world)["chains"] == [
        {"source": "r1", "targets": ["r3"]},
        {"source": "r1", "targets": ["r5"]},
    ]


def test_a_load_from_the_nodes_own_file_is_in_no_chain() -> None:
    world = loading("prefill", "decode", "spare", ladder_chain=0, ladder_p2p=0, ladder_pool=0)
    world.feed(ev.ScaleRequested(1, 2))
    shown = plan(world)
    assert [(load["rung"], load["source"]) for load in shown["loads"]] == [("disk", "disk")]
    assert shown["chains"] == []


def test_who_keeps_the_pools_copy_is_told() -> None:
    world = loading("prefill", "decode", "spare")
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    assert plan(world)["pool"] == {"r2": "filling"}
    world.feed(ev.PoolCopyEnded("r2", 1, 1000))
    assert plan(world)["pool"] == {"r2": "held"}


def test_a_log_of_before_folds_without_reasons() -> None:
    world = loading("prefill", "decode", "spare")
    world.feed(ev.ScaleRequested(1, 2))
    state = ClusterState()
    for record in world.log:
        payload = record.payload
        if isinstance(payload, ev.NodeStarted):
            old = ev.NodeStarted(1, "test", "local", payload.policy, REASONS_SINCE - 1)
            record = type(record)(record.seq, 0, record.mono_ns, record.cause, old)
        fold(state, record)
    assert {(r.rung, r.skipped) for r in state.replicas.values()} == {("", ())}
