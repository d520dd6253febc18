"""One ladder for every raise: which rung, and why not one before it; the nine cases."""

import pytest

from blitzd.control.commands import LoadModel
from blitzd.control.explain import Explainer
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm import ClusterState
from tests.control.harness import Harness, ReplicaState, only

S = ReplicaState
NETWORK = ("ladder_nvlink", "ladder_shard", "ladder_chain", "ladder_p2p")


def raised(events: list[Payload]) -> list[tuple[str, str, str]]:
    """(type, replica, rung) of all that names a rung, in order."""
    return [
        (type(e).__name__, e.replica, e.rung)
        for e in events
        if isinstance(e, ev.ReplicaRevived | ev.NullReused | ev.RoleAssigned | ev.LoadStarted)
    ]


def busy_decode(world: Harness, request_id: int) -> str:
    world.arrive(request_id)
    world.first_token(request_id)
    world.imported(request_id)
    return world.state.requests[request_id].target


def with_one_of_each(**policy: int) -> tuple[Harness, str, str]:
    """A decode that shuts with work, a warm spare that was a decode, and a cold spare, r5."""
    world = Harness(**policy).serving(*["prefill"] + ["decode"] * 3 + ["prefill", "spare"])
    targets = {busy_decode(world, n) for n in (1, 2, 3)}
    assert len(targets) == 3
    last = world.state.requests[3].target
    world.ended(3)
    world.feed(ev.ScaleRequested(2, 1))
    [shutting] = world.state.in_states(S.SHUTTING_DECODE)
    [null] = world.state.in_states(S.SHUTTING_NULL)
    assert null.id == last
    return world, shutting.id, null.id


def test_the_rungs_are_climbed_in_order_and_each_event_says_why_not_one_before() -> None:
    world, shutting, null = with_one_of_each()
    events = world.feed(ev.ScaleRequested(2, 4))
    assert raised(events) == [
        ("ReplicaRevived", shutting, "revive"),
        ("NullReused", null, "reuse"),
        ("RoleAssigned", "r5", "load"),
        ("LoadStarted", "r5", "map"),
    ]
    assert only(events, ev.ReplicaRevived).skipped == ()
    assert only(events, ev.NullReused).skipped == (("revive", "taken for 1 of 3"),)
    assert only(events, ev.RoleAssigned).skipped == (
        ("revive", "taken for 1 of 3"),
        ("reuse", "taken for 1 of 3"),
    )
    assert only(events, ev.LoadStarted).skipped == ()
    assert world.commanded(LoadModel) == [LoadModel("r5", 1, (), "map")]


def test_a_rung_that_is_off_is_passed_over_by_name() -> None:
    world, _, null = with_one_of_each()
    world.feed(ev.PolicyRequested((("ladder_revive", 0),)))
    reused = only(world.feed(ev.ScaleRequested(2, 2)), ev.NullReused)
    assert reused.replica == null
    assert reused.skipped == (("revive", "off: ladder_revive is 0"),)


def test_a_warm_spare_of_another_role_is_left_if_the_policy_says_so() -> None:
    world, _, null = with_one_of_each(ladder_reuse_any=0)
    events = world.feed(ev.ScaleRequested(3, 1))
    assert raised(events)[0] == ("RoleAssigned", "r5", "load")
    assert only(events, ev.RoleAssigned).skipped[1] == (
        "reuse",
        "no spare that may be prefill still has the weights",
    )
    assert world.replica(null).state is S.SHUTTING_NULL


@pytest.mark.parametrize(
    ("policy", "rung", "source"),
    [
        ({}, "map", "map"),
        ({"ladder_map": 0}, "nvlink", "r0"),
        ({"ladder_map": 0} | dict.fromkeys(NETWORK[:2], 0), "chain", "r1"),
        ({"ladder_map": 0} | dict.fromkeys(NETWORK[:3], 0), "p2p", "r1"),
        (dict.fromkeys(NETWORK, 0) | {"ladder_map": 0, "ladder_pool": 0}, "disk", "disk"),
    ],
)
def test_weights_come_from_the_first_rung_that_is_on(
    policy: dict[str, int], rung: str, source: str
) -> None:
    world = Harness().serving("prefill", "decode", "spare")
    if policy:
        world.feed(ev.PolicyRequested(tuple(policy.items())))
    started = only(world.feed(ev.ScaleRequested(1, 2)), ev.LoadStarted)
    assert (started.rung, started.source) == (rung, source)
    order = ["map", "nvlink", "shard", "chain", "p2p", "host", "pool", "disk"]
    passed = order[: order.index(rung)]
    assert started.skipped == tuple((name, f"off: ladder_{name} is 0") for name in passed)
    [load] = world.commanded(LoadModel)
    assert load.rung == rung
    assert [peer for peer, _ in load.peers] == ([source] if source in ("r0", "r1") else [])


def test_point_to_point_gives_to_one_each_and_the_rest_reads_the_disk() -> None:
    world = Harness().serving("prefill", "decode", "spare", "spare")
    off = [(f"ladder_{name}", 0) for name in ("map", "nvlink", "chain")]
    world.feed(ev.PolicyRequested(tuple(off)))
    events = world.feed(ev.ScaleRequested(1, 3))
    loads = [e for e in events if isinstance(e, ev.LoadStarted)]
    assert [(e.replica, e.source) for e in loads] == [("r2", "r1"), ("r3", "disk")]
    assert dict(loads[1].skipped)["p2p"] == "nobody with a free egress has all the weights"


def test_prefills_give_over_the_network_only_if_the_policy_lets_their_kv_suffer() -> None:
    world = Harness().serving("prefill", "prefill", "spare")
    off = (("ladder_map", 0), ("ladder_nvlink", 0))
    world.feed(ev.PolicyRequested((*off, ("ladder_prefills_give", 1))))
    assert only(world.feed(ev.RoleRequested("r2", "prefill")), ev.LoadStarted).source == "r0"


def test_a_decision_explains_the_ladder_it_climbed() -> None:
    world, _, null = with_one_of_each(ladder_revive=0)
    world.feed(ev.ScaleRequested(2, 2))
    record = next(r for r in reversed(world.log) if isinstance(r.payload, ev.NullReused))
    explainer = Explainer(record.seq, ClusterState())
    for one in world.log:
        explainer.see(one)
    found = explainer.finish()
    assert found is not None
    assert found.facts["ladder"] == {"revive": "off: ladder_revive is 0", "reuse": "taken"}
    assert found.facts["policy"]["ladder_revive"] == 0
    assert null in found.facts["replicas"]


# Prefill up, stay, down times decode up, stay, down: three of each, two spares without weights.

UP, STAY, DOWN = 1, 0, -1
MOVES = (
    ev.MutationStarted,
    ev.ShutdownStarted,
    ev.ReplicaExpired,
    ev.NullReused,
    ev.RoleAssigned,
    ev.LoadStarted,
)
MUTATED = ["MutationStarted decode"]
LOADED = {r: [f"RoleAssigned {r}", f"LoadStarted {r}"] for r in ("decode", "prefill")}
# An idle decode goes in one move; what shuts is emptied at once, since nothing runs.
SHUT = {"decode": ["ReplicaExpired decode"], "prefill": ["ShutdownStarted prefill"]}
CASES = {
    (UP, UP): LOADED["decode"][:1] + LOADED["prefill"][:1] + ["LoadStarted *"] * 2,
    (UP, STAY): LOADED["prefill"],
    # The decode that went is warm: the prefill that is missing needs no load.
    (UP, DOWN): [*SHUT["decode"], "NullReused prefill"],
    (STAY, UP): LOADED["decode"],
    (STAY, STAY): [],
    (STAY, DOWN): SHUT["decode"],
    (DOWN, UP): MUTATED,
    (DOWN, STAY): SHUT["prefill"],
    (DOWN, DOWN): [*SHUT["decode"], *SHUT["prefill"]],
}


@pytest.mark.parametrize("mapped", [1, 0], ids=["mapped", "moved"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "prefill{:+}-decode{:+}".format(*case))
def test_the_nine_cases(case: tuple[int, int], mapped: int) -> None:
    """Also when weights move over the network: E1, E2 and E9 were about that."""
    world = Harness(ladder_map=mapped, ladder_nvlink=0)
    world.serving(*["prefill"] * 3 + ["decode"] * 3 + ["spare"] * 2)
    prefill, decode = 3 + case[0], 3 + case[1]
    events = world.feed(ev.ScaleRequested(prefill, decode))
    found = [_move(world, e) for e in events if isinstance(e, MOVES)]
    wanted = CASES[case]
    assert [m.split()[0] for m in found] == [m.split()[0] for m in wanted]
    assert all(w.endswith("*") or w == m for w, m in zip(wanted, found, strict=True)), found
    for event in events:
        if isinstance(event, ev.LoadStarted):
            assert event.rung == ("map" if mapped else "chain")
            world.load(event.replica)
    world.after(1)
    assert len(world.state.in_states(S.PREFILL)) == prefill
    assert len(world.state.in_states(S.DECODE)) == decode


def _move(world: Harness, event: Payload) -> str:
    role = getattr(event, "role", "")
    if not role:
        before = {r.id: r.configured for r in world.state.replicas.values()}
        role = before[event.replica]  # type: ignore[attr-defined]
    return f"{type(event).__name__} {role}"


def test_without_mutation_a_decode_is_loaded_and_the_prefill_shut() -> None:
    world = Harness(ladder_mutate=0).serving("prefill", "prefill", "decode", "spare")
    events = world.feed(ev.ScaleRequested(1, 2))
    assert [type(e) for e in events if isinstance(e, MOVES[:3])] == [ev.ShutdownStarted]
    assert only(events, ev.LoadStarted).replica == "r3"
