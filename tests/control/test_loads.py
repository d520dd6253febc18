"""Where a load's weights come from: chains of replicas, healed and replanned when one dies."""

from blitzd.control.commands import LoadModel
from blitzd.events import types as ev
from tests.control.harness import Harness, ReplicaState, only


def started(events) -> dict[str, tuple[str, tuple[tuple[str, int], ...]]]:
    return {e.replica: (e.source, e.peers) for e in events if isinstance(e, ev.LoadStarted)}


def serving(*roles: str) -> Harness:
    """All of them mapped the file; from now on loads come in chains or from the disk."""
    world = Harness().serving(*roles)
    world.feed(ev.PolicyRequested((("ladder_map", 0), ("ladder_nvlink", 0))))
    return world


def test_without_the_policy_every_load_maps_the_nodes_file() -> None:
    world = Harness()
    world.boot("prefill", "decode")
    assert started(world.attach("r0")) == {"r0": ("map", ())}
    assert world.commanded(LoadModel) == [LoadModel("r0", 1, ())]


def test_several_loads_at_once_are_one_chain_from_a_replica_with_a_free_egress() -> None:
    world = serving("prefill", "decode", "spare", "spare", "spare")
    events = world.feed(ev.ScaleRequested(2, 3))
    # r0 is a Prefill: its KV leaves the way that weights would.
    assert started(events) == {
        "r2": ("r1", (("r1", 1),)),
        "r3": ("r2", (("r2", 1), ("r1", 1))),
        "r4": ("r3", (("r3", 1), ("r2", 1), ("r1", 1))),
    }
    assert [c.peers for c in world.commanded(LoadModel)] == [
        (("r1", 1),),
        (("r2", 1), ("r1", 1)),
        (("r3", 1), ("r2", 1), ("r1", 1)),
    ]
    links = [(link["source"], link["target"]) for link in world.state.to_json()["links"]]
    assert links == [("r1", "r2"), ("r2", "r3"), ("r3", "r4")]
    for replica in ("r2", "r3", "r4"):
        world.load(replica)
    assert world.state.to_json()["links"] == []


def test_a_later_load_hangs_onto_the_end_of_a_chain_under_way() -> None:
    world = serving("prefill", "decode", "spare", "spare")
    world.feed(ev.RoleRequested("r2", "decode"))
    assert started(world.feed(ev.RoleRequested("r3", "decode"))) == {
        "r3": ("r2", (("r2", 1), ("r1", 1)))
    }


def test_with_nothing_but_prefills_the_file_is_taken_since_their_egress_is_for_kv() -> None:
    world = serving("prefill", "prefill", "spare")
    assert started(world.feed(ev.RoleRequested("r2", "prefill"))) == {"r2": ("disk", ())}


def test_a_chain_that_healed_shows_the_link_that_is_used_now() -> None:
    world = serving("prefill", "decode", "spare", "spare")
    world.feed(ev.ScaleRequested(1, 3))
    world.feed(ev.WorkerExited("r2", 1, "killed"))
    world.feed(ev.LoadMoved("r3", 1, 2, 30, 100, 1000, "r1"))
    assert world.replica("r3").source == "r1"
    links = [(link["source"], link["target"]) for link in world.state.to_json()["links"]]
    assert links == [("r1", "r3")]
    # The dead one's next life hangs onto the chain's end, not onto a link that is in use.
    events = world.attach("r2", 200)
    assert started(events) == {"r2": ("r3", (("r3", 1), ("r2", 1), ("r1", 1)))}


def test_a_load_that_peers_failed_twice_takes_the_file() -> None:
    world = serving("prefill", "decode", "spare")
    world.feed(ev.RoleRequested("r2", "decode"))
    failed = ev.LoadEnded("r2", 1, "", "r1", 30, 0, 64, 0, "unavailable")
    again = world.feed(failed)
    assert started(again) == {"r2": ("r1", (("r1", 1),))}
    events = world.feed(failed) + world.after(60_000)
    assert started(events) == {"r2": ("disk", ())}
    world.load("r2")
    assert world.replica("r2").state is ReplicaState.DECODE
    assert world.replica("r2").peer_failures == 0


def test_the_death_of_the_source_ends_in_the_file_when_nobody_else_has_the_weights() -> None:
    world = serving("prefill", "decode", "spare", "spare")
    world.feed(ev.ScaleRequested(1, 3))
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    loads = {}
    for replica in ("r2", "r3"):
        loads |= started(
            world.feed(ev.LoadEnded(replica, 1, "", "r1", 30, 0, 64, 0, "unavailable: r1 is gone"))
        )
    # Not from each other: r3 may still turn to r2.
    assert loads == {"r2": ("disk", ()), "r3": ("r2", (("r2", 1),))}
    for replica in ("r2", "r3"):
        world.load(replica)
        assert world.replica(replica).state is ReplicaState.DECODE


def test_a_null_that_gives_its_weights_keeps_them_until_the_load_ends() -> None:
    world = serving("prefill", "decode", "decode", "spare")
    world.feed(ev.ScaleRequested(1, 1))
    null = next(r for r in world.state.replicas.values() if r.state is ReplicaState.SHUTTING_NULL)
    other = next(r for r in ("r1", "r2") if r != null.id)
    world.feed(ev.WorkerExited(other, 1, "killed"))
    world.attach(other, 300)
    assert world.replica(other).source == null.id
    refused = only(world.feed(ev.DeactivateRequested(null.id)), ev.CommandRefused)
    assert "weights" in refused.reason
    assert not [e for e in world.after(60_000) if isinstance(e, ev.ReplicaDeactivated)]
    events = world.load(other) + world.after(1)
    assert only(events, ev.ReplicaDeactivated).replica == null.id
