"""The rung of shards: nodes of several links take the weights in over all of them."""

import pytest

from blitzd.control.commands import LoadModel
from blitzd.control.redecide import redecide
from blitzd.events import types as ev
from tests.control.harness import Harness, ReplicaState, refold

GB = 10**9
GIVERS = ("r0", "a.r0", "b.r1", "b.r0")
S = ReplicaState


def links(node: str, count: int = 2) -> ev.NodeLinks:
    return ev.NodeLinks(node, tuple(f"e{i}" for i in range(count)), 12 * GB, "l1")


def cluster(*topology: ev.NodeLinks, spares: int = 2) -> Harness:
    """r0 and r1 of the controller's node are decodes with weights, r2 is a prefill; a and b
    offer spares whose workers are there."""
    world = Harness()
    world.topology = topology
    world.serving("decode", "decode", "prefill")
    off = (("ladder_map", 0), ("ladder_p2p", 0))
    world.feed(ev.PolicyRequested(off))
    for node in "ab":
        offered = tuple((f"{node}.r{i}", "spare") for i in range(spares))
        world.feed(ev.AgentJoined(node, 1, "10.0.0.2", "test", "x86_64", 2, 1024, offered))
        for replica, _ in offered:
            world.attach(replica)
    return world


def started(events) -> dict[str, ev.LoadStarted]:
    return {e.replica: e for e in events if isinstance(e, ev.LoadStarted)}


def test_each_link_of_each_node_carries_a_shard_and_the_event_names_them() -> None:
    world = cluster(links("local", 3), links("a"), links("b"))
    found = started(world.feed(ev.ScaleRequested(1, 6)))
    assert {e.rung for e in found.values()} == {"shard"}
    takers = {node: ((f"{node}.r0", 1), (f"{node}.r1", 1)) for node in "ab"}
    assert {r: (e.peers, e.shards) for r, e in found.items()} == {
        "a.r0": ((("r0", 1),), takers["a"]),
        "a.r1": ((("r1", 1),), takers["a"]),
        "b.r0": ((("a.r0", 1), ("r0", 1)), takers["b"]),
        "b.r1": ((("a.r1", 1), ("r1", 1)), takers["b"]),
    }
    skipped = dict(found["a.r0"].skipped)
    assert skipped == {
        "map": "off: ladder_map is 0",
        "nvlink": "nobody of its node has weights to give",
    }
    # 500 bytes of each shard, over two hops of 12 GB/s: the least.
    assert {c.chunk_bytes for c in world.commanded(LoadModel)} == {64 << 10}
    told = {c.replica: (c.peers, c.shards, c.rung) for c in world.commanded(LoadModel)}
    assert told == {r: (e.peers, e.shards, "shard") for r, e in found.items()}
    over = [(link["source"], link["target"]) for link in world.state.to_json()["links"]]
    inside = [(f"{node}.r{i}", f"{node}.r{1 - i}") for node in "ab" for i in range(2)]
    network = [("a.r0", "b.r0"), ("a.r1", "b.r1"), ("r0", "a.r0"), ("r1", "a.r1")]
    assert sorted(over) == sorted(inside + network)


def test_what_comes_in_shards_is_counted_from_each_that_brought_one() -> None:
    world = cluster(links("local", 3), links("a"), links("b"))
    world.feed(ev.ScaleRequested(1, 6))
    world.feed(ev.LoadMoved("b.r0", 1, 2, 30, 501, 1000, "a.r0"))
    moved = {r: (world.replica(r).weights_out, world.replica(r).weights_in) for r in GIVERS}
    assert moved == {"a.r0": (251, 0), "b.r1": (250, 0), "r0": (0, 0), "b.r0": (0, 501)}
    world.load("b.r0")
    assert world.replica("b.r0").weights_in == 1000
    assert world.replica("b.r0").shards == ()
    assert refold(world.log).hash() == world.state.hash()


def test_one_that_shares_a_takers_link_gathers_and_takes_none() -> None:
    world = cluster(links("local", 3), links("a"), links("b"), spares=3)
    found = started(world.feed(ev.ScaleRequested(1, 8)))
    third = found["b.r2"]
    assert third.shards == third.peers == (("b.r0", 1), ("b.r1", 1))


@pytest.mark.parametrize(
    ("topology", "policy"),
    [
        ((), {}),
        ((links("local", 3), links("a", 1), links("b", 1)), {}),
        ((links("local", 3), links("a"), links("b")), {"ladder_shard": 0}),
    ],
)
def test_with_one_link_or_none_described_the_chain_is_next(topology, policy) -> None:
    world = cluster(*topology)
    if policy:
        world.feed(ev.PolicyRequested(tuple(policy.items())))
    found = started(world.feed(ev.ScaleRequested(1, 6)))
    assert not any(e.shards for e in found.values())
    assert {e.rung for e in found.values()} & {"chain"}
    assert "shard" in dict(next(iter(found.values())).skipped)


def test_the_link_of_a_prefill_gives_no_shard() -> None:
    """r2, a prefill, has the link of r0."""
    world = cluster(links("local"), links("a"), links("b"))
    found = started(world.feed(ev.ScaleRequested(1, 4)))
    assert not any(e.shards for e in found.values())


def test_a_taker_that_dies_loads_again_from_its_neighbour() -> None:
    world = cluster(links("local", 3), links("a"), links("b"))
    world.feed(ev.ScaleRequested(1, 6))
    world.feed(ev.WorkerExited("b.r1", 1, "killed"))
    again = started(world.after(5000) + world.attach("b.r1"))
    assert again["b.r1"].rung == "nvlink" and again["b.r1"].source == "b.r0"
    assert again["b.r1"].shards == ()


def test_a_load_whose_peers_all_failed_starts_again_and_the_log_says_the_same() -> None:
    world = cluster(links("local", 3), links("a"), links("b"))
    world.feed(ev.ScaleRequested(1, 6))
    for replica in ("a.r0", "a.r1", "b.r0", "b.r1"):
        world.feed(ev.LoadEnded(replica, 1, "", "r0", 30, 0, 64, 0, "unavailable"))
    assert world.replica("a.r0").peer_failures == 1
    assert redecide(world.log).difference is None
