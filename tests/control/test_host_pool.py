"""The copy that one node keeps for all: made when no replica gives, one at most, moved when its
keeper dies, dropped when a replica gives again."""

from hypothesis import given, settings, strategies as st

from blitzd.control import host_pool
from blitzd.control.commands import HoldWeights, LoadModel, ResetWorker
from blitzd.control.holders import KV_LEAVES
from blitzd.control.policy import Policy
from blitzd.control.redecide import redecide
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm.table import LOADING, WITHOUT_WEIGHTS
from tests.control.harness import Harness, ReplicaState, only, refold

S = ReplicaState
MOVES = {"ladder_map": 0, "ladder_nvlink": 0}
POOL_EVENTS = (ev.PoolCopyAssigned, ev.PoolCopyHeld, ev.PoolCopyFailed, ev.PoolCopyReleased)


def cluster(*local: str, nodes: tuple[str, ...] = ("b", "c"), **policy: int) -> Harness:
    """Local replicas that serve, and a spare on each node."""
    made = Harness(**MOVES | policy)
    made.boot(*local)
    for node in nodes:
        offer(made, node, 1)
    for replica in list(made.state.replicas):
        made.attach(replica)
    while loading := made.state.in_states(*LOADING):
        made.load(loading[0].id)
    return made


def offer(made: Harness, node: str, epoch: int) -> list[Payload]:
    offered = ((f"{node}.r0", "spare"),)
    return made.feed(ev.AgentJoined(node, epoch, "10.0.0.2", "t", "x86_64", 2, 1024, offered))


def hold(made: Harness, replica: str) -> list[Payload]:
    return made.feed(ev.PoolCopyEnded(replica, made.replica(replica).epoch, 1000))


def pool_events(events: list[Payload]) -> list[Payload]:
    return [e for e in events if isinstance(e, POOL_EVENTS)]


def keeper(made: Harness) -> str:
    return ",".join(made.state.index.pooled)


def test_while_a_decode_gives_nobody_keeps_a_copy() -> None:
    made = cluster("prefill", "decode")
    assert not [r for r in made.log if isinstance(r.payload, POOL_EVENTS)]


def test_with_prefills_alone_a_spare_keeps_one_and_feeds_the_next_decode() -> None:
    """E10: their egress is for KV, so nobody else could."""
    made = cluster("prefill", "decode")
    events = made.feed(ev.WorkerExited("r1", 1, "killed"))
    assert only(events, ev.PoolCopyAssigned).replica == "b.r0"
    assert made.commanded(HoldWeights) == [HoldWeights("b.r0", 1)]
    assert only(hold(made, "b.r0"), ev.PoolCopyHeld).bytes_total == 1000
    [shown] = [r for r in made.state.to_json()["replicas"] if r["id"] == "b.r0"]
    assert shown["pooled"] == "held"
    events = made.attach("r1", 200)
    started = only(events, ev.LoadStarted)
    assert (started.rung, started.source, started.peers) == ("pool", "b.r0", (("b.r0", 1),))
    assert [reason for _, reason in started.skipped][3:] == [
        "nobody with a free egress has weights to give",
        "nobody with a free egress has all the weights",
        "off: ladder_host is 0",
    ]
    # It gives until the load has ended, and is not needed then.
    assert not pool_events(events)
    assert made.state.feeding() == {"b.r0"}
    released = made.load("r1") + made.after(1)
    assert only(released, ev.PoolCopyReleased).reason == "a replica gives the weights"
    assert keeper(made) == ""
    assert refold(made.log).hash() == made.state.hash()
    assert redecide(made.log).difference is None


def test_the_release_makes_the_worker_let_go() -> None:
    made = cluster("prefill", "decode")
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    hold(made, "b.r0")
    made.attach("r1", 200)
    made.load("r1")
    assert made.commanded(ResetWorker) == [ResetWorker("b.r0", 1, unload=True)]


def test_the_copy_moves_to_another_node_in_the_turn_in_which_its_keeper_dies() -> None:
    made = cluster("prefill", "decode")
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    hold(made, "b.r0")
    events = made.feed(ev.AgentLost("b", 1, "not heard of for 10 s"))
    assert only(events, ev.PoolCopyAssigned).replica == "c.r0"
    hold(made, "c.r0")
    assert keeper(made) == "c.r0"


def test_one_that_loads_from_it_when_it_dies_gets_it_from_the_next_keeper() -> None:
    made = cluster("prefill", "decode")
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    hold(made, "b.r0")
    made.attach("r1", 200)
    made.feed(ev.AgentLost("b", 1, "gone"))
    events = made.feed(ev.LoadEnded("r1", 2, "", "b.r0", 30, 0, 64, 0, "b.r0 is gone"))
    assert only(events, ev.PoolCopyAssigned).replica == "c.r0"
    hold(made, "c.r0")
    started = only(made.after(60_000), ev.LoadStarted)
    assert (started.rung, started.source) == ("pool", "c.r0")


def test_the_keeper_is_raised_first_and_copies_its_own() -> None:
    made = cluster("prefill", "spare", "decode")
    made.feed(ev.WorkerExited("r2", 1, "killed"))
    hold(made, "b.r0")
    events = made.feed(ev.ScaleRequested(1, 3))
    loads = [e for e in events if isinstance(e, ev.LoadStarted)]
    assert [(e.replica, e.rung, e.source) for e in loads] == [
        ("b.r0", "pool", "pool"),
        ("c.r0", "pool", "b.r0"),
    ]
    assert made.commanded(LoadModel)[0] == LoadModel("b.r0", 1, (), "pool")
    # A copy on a device is on its way: no other host's copy is made meanwhile.
    assert not pool_events(events) and keeper(made) == ""


def test_a_later_load_hangs_onto_the_chain_from_the_pool() -> None:
    made = cluster("prefill", "decode", nodes=("b", "c", "d"))
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    hold(made, "b.r0")
    made.attach("r1", 200)
    started = only(made.feed(ev.RoleRequested("c.r0", "decode")), ev.LoadStarted)
    assert (started.rung, started.source) == ("chain", "r1")
    assert started.peers == (("r1", 2), ("b.r0", 1))


def test_one_that_cannot_keep_it_is_passed_over() -> None:
    made = cluster("prefill", "decode")
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    events = made.feed(ev.PoolCopyEnded("b.r0", 1, 0, "layer 2 has another digest"))
    assert only(events, ev.PoolCopyFailed).reason == "layer 2 has another digest"
    assert only(events, ev.PoolCopyAssigned).replica == "c.r0"


def test_one_that_it_cannot_reach_takes_its_own_file_in_the_end() -> None:
    """As with other peers: the third try in a row asks nobody."""
    made = cluster("prefill", "decode")
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    hold(made, "b.r0")
    events = made.attach("r1", 200)
    rungs = []
    for _ in range(3):
        rungs.append(only(events, ev.LoadStarted).rung)
        made.feed(ev.LoadEnded("r1", 2, "", "b.r0", 30, 0, 64, 0, "b.r0/1: peer was lost"))
        events = made.after(60_000)
    assert rungs == ["pool", "pool", "disk"]


def test_a_node_without_weights_and_with_a_fast_link_keeps_it() -> None:
    made = Harness(**MOVES)
    made.topology = (ev.NodeLinks("b", ("e0",), 10), ev.NodeLinks("c", ("e0",), 20))
    made.boot("prefill", "decode", "spare")
    for node in ("b", "c"):
        offer(made, node, 1)
    for replica in list(made.state.replicas):
        made.attach(replica)
    while loading := made.state.in_states(*LOADING):
        made.load(loading[0].id)
    events = made.feed(ev.WorkerExited("r1", 1, "killed"))
    assert only(events, ev.PoolCopyAssigned).replica == "c.r0"


def test_the_mapped_pool_needs_no_keeper_and_the_policy_can_do_without() -> None:
    for policy in ({"ladder_map": 1}, {"ladder_pool": 0}, {"ladder_chain": 0, "ladder_p2p": 0}):
        made = cluster("prefill", "decode", **policy)
        assert not pool_events(made.feed(ev.WorkerExited("r1", 1, "killed")))
    made = cluster("prefill", "decode")
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    events = made.feed(ev.PolicyRequested((("ladder_map", 1),))) + made.after(1)
    assert only(events, ev.PoolCopyReleased).reason == "the policy wants no pool"


def test_a_restarted_daemon_makes_it_anew() -> None:
    made = cluster("prefill", "decode", "spare", nodes=())
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    hold(made, "r2")
    adopted = (("r0", 1, 100), ("r2", 1, 100))
    events = made.boot("prefill", "decode", "spare", adopted=adopted)
    assert only(events, ev.PoolCopyAssigned).replica == "r2"
    assert made.replica("r2").pooled == "filling"


# Whatever dies.

ACTS = st.tuples(
    st.sampled_from(["die", "lose", "join", "attach", "load", "fail", "hold", "scale", "time"]),
    st.integers(0, 60),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTS, min_size=10, max_size=80))
def test_there_is_a_copy_somewhere_or_nobody_who_could_keep_one(
    acts: list[tuple[str, int]],
) -> None:
    made = cluster("prefill", "decode", "spare", nodes=("b", "c", "d"), null_ttl_ms=1000)
    epochs = dict.fromkeys("bcd", 1)
    for act, number in acts:
        _act(made, epochs, act, number)
        _check(made)
    assert refold(made.log).hash() == made.state.hash()


def _act(made: Harness, epochs: dict[str, int], act: str, number: int) -> None:
    state = made.state
    replica = list(state.replicas.values())[number % len(state.replicas)]
    on, node = (replica.id, replica.epoch), "bcd"[number % 3]
    if act == "die" and replica.worker != "absent":
        made.feed(ev.WorkerExited(*on, "killed"))
    elif act == "lose":
        made.feed(ev.AgentLost(node, epochs[node], "gone"))
    elif act == "join" and state.agents[node].phase == "lost":
        epochs[node] += 1
        offer(made, node, epochs[node])
    elif act == "attach":
        for one in [r for r in state.replicas.values() if r.worker == "spawning"]:
            made.attach(one.id)
    elif act in ("load", "fail"):
        for one in state.in_states(*LOADING)[:1]:
            why = "no peer has it" if act == "fail" else ""
            end = ("digest", one.source, 30, 1000, 64, 64, why)
            made.feed(ev.LoadEnded(one.id, one.epoch, *end))
    elif act == "hold":
        for name in sorted(state.index.pooled):
            if state.replicas[name].pooled == "filling":
                why = "no room" if number % 5 == 0 else ""
                made.feed(ev.PoolCopyEnded(name, state.replicas[name].epoch, 1000, why))
    elif act == "scale":
        total = max(2, len(state.replicas))
        prefill = 1 + number % max(1, total - 1)
        made.feed(ev.ScaleRequested(prefill, max(1, min(3, total - prefill))))
    elif act == "time":
        made.after(100 * number)


def _check(made: Harness) -> None:
    """After a turn. That there is one copy at most is an invariant of every event."""
    state = made.state
    replicas = list(state.replicas.values())
    gives = [r for r in replicas if r.state not in {*WITHOUT_WEIGHTS, *LOADING, *KV_LEAVES}]
    soon = [
        r
        for r in replicas
        if r.role == "decode" and (r.state in LOADING or (r.state is S.INACTIVE and not r.trouble))
    ]
    pooled = [r for r in replicas if r.pooled]
    could = [
        r
        for r in replicas
        if (r.role, r.state, r.worker) == ("spare", S.INACTIVE, "attached")
        and r.retry_ns <= made.now
    ]
    assert gives or soon or pooled or not could
    if gives and pooled:
        assert pooled[0].id in state.feeding()


def test_the_rules_above_are_those_of_the_code() -> None:
    """A story in which each of the ways to have a copy comes about."""
    made = cluster("prefill", "decode", nodes=("b",))
    assert not keeper(made)
    made.feed(ev.WorkerExited("r1", 1, "killed"))
    assert keeper(made) == "b.r0"
    made.feed(ev.WorkerExited("b.r0", 1, "killed"))
    assert not keeper(made)
    made.attach("b.r0")
    assert keeper(made) == "b.r0"
    assert host_pool.keeper_of(Turn(made.state, ev.Ticked(), 0, 0, Policy(), lambda _: 0)) is None
