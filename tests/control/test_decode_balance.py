"""KV goes where the fewest blocks are in use, and nobody waits for ever (reference 7.6)."""

from hypothesis import given, settings, strategies as st

from blitzd.control.explain import Explainer, Explanation
from blitzd.events import types as ev
from blitzd.fsm import ClusterState, RequestState
from tests.control.harness import Harness, only

BLOCK = 64


def cluster(*decode_blocks: int, prefill: int = 1, **policy: int) -> Harness:
    """Prefill replicas r0..., then a decode replica of each size."""
    policy = {"max_prefills_per_replica": 1000, "decode_reserve_tokens": BLOCK} | policy
    world = Harness(**policy)
    world.boot(*["prefill"] * prefill, *["decode"] * len(decode_blocks))
    for number, blocks in enumerate([4096] * prefill + list(decode_blocks)):
        world.attach(f"r{number}", pid=100 + number)
        world.load(f"r{number}", blocks)
    return world


def put(world: Harness, request_id: int, blocks: int) -> str:
    """A request that needs so many blocks to decode; the replica that gets it, or ""."""
    world.arrive(request_id, prompt=(blocks - 1) * BLOCK, max_tokens=BLOCK)
    world.first_token(request_id)
    return world.state.requests[request_id].target


def explain(world: Harness, seq: int) -> Explanation:
    explainer = Explainer(seq, ClusterState())
    for record in world.log:
        if not explainer.see(record):
            break
    found = explainer.finish()
    assert found is not None
    return found


def waiting(world: Harness) -> list[int]:
    return list(world.state.index.unplaced)


def test_a_new_replica_does_not_get_everything_at_once() -> None:
    """Peers #43: an empty one is the best choice for each, and its link the worst for all."""
    world = cluster(64, 64, 64, max_imports_per_replica=2)
    for request_id in range(1, 13):
        put(world, request_id, 4)
    busy = [r for r in world.state.requests.values() if r.lease_id]
    assert len(busy) == 6, "two at a time each"
    for request in busy:
        world.imported(request.id)
    assert waiting(world) == []
    for request in [r for r in world.state.requests.values() if r.target == "r3"]:
        if request.lease_id:
            world.imported(request.id)
        world.ended(request.id)
    for request in list(world.state.requests.values()):
        if request.lease_id:
            world.imported(request.id)
    assert world.state.blocks_reserved("r3") == 0
    targets = [put(world, 100 + i, 4) for i in range(4)]
    assert targets == ["r3", "r3", "r1", "r2"], "then the next best"


def test_what_a_worker_says_counts_when_it_is_more_than_what_was_reserved() -> None:
    world = cluster(64, 64)
    assert put(world, 1, 8) == "r1"
    world.feed(ev.OccupancyReported("r2", 1, 30, 1))
    assert put(world, 2, 4) == "r1", "a generation on r2 has outgrown its reservation"


def test_a_hot_replica_waits_for_the_others() -> None:
    world = cluster(100, 10, 10, 10, max_imports_per_replica=100)
    world.feed(ev.OccupancyReported("r1", 1, 60, 1))
    for request_id in (1, 2, 3):
        assert put(world, request_id, 8) != "r1"
    assert put(world, 4, 4) == "", "the others are full, r1 is hot"
    found = explain(world, world.log[-1].seq)
    reasons = {c.replica: c.refusal for c in found.candidates}
    assert reasons["r1"] == (
        "60 of its 100 blocks are in use, more than half and more than twice the mean of 21"
    )
    assert reasons["r2"] == "4 blocks are needed, 2 are free"
    world.imported(2)
    events = world.ended(2)
    assert only(events, ev.MigrationStarted).request_id == 4


def test_nobody_waits_for_others_that_are_too_small() -> None:
    world = cluster(100, 10, 10, 10)
    world.feed(ev.OccupancyReported("r1", 1, 60, 1))
    assert put(world, 1, 20) == "r1", "hot, but no other will ever have 20 blocks"


def test_short_ones_do_not_starve_a_long_one() -> None:
    world = cluster(16, max_imports_per_replica=100)
    put(world, 1, 12)
    world.imported(1)
    assert put(world, 2, 10) == ""
    assert put(world, 3, 1) == "", "it came later"
    events = world.ended(1)
    placed = [e.request_id for e in events if isinstance(e, ev.MigrationStarted)]
    assert placed == [2, 3]


def test_one_that_was_refused_does_not_hold_up_the_rest() -> None:
    """No room there is the worker's word; the request tries again later, others go on."""
    world = cluster(64)
    put(world, 1, 4)
    lease = world.state.requests[1].lease_id
    world.feed(ev.ImportEnded(lease, 0, 0, "no_room", "no blocks"))
    assert world.state.requests[1].retry_ns > world.now
    assert put(world, 2, 4) == "r1"
    assert only(world.after(1000), ev.MigrationStarted).request_id == 1


def test_one_transfer_at_a_time_is_the_original_s_guard() -> None:
    world = cluster(64, 64, max_imports_per_replica=1)
    assert [put(world, i, 2) for i in (1, 2, 3)] == ["r1", "r2", ""]


SIZES = st.lists(st.integers(12, 64), min_size=1, max_size=5)


@given(
    sizes=SIZES,
    blocks=st.lists(st.integers(1, 40), min_size=1, max_size=25),
    imports=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_no_request_is_stuck(
    sizes: list[int], blocks: list[int], imports: int, order: st.DataObject
) -> None:
    """Whatever the sizes and the order in which transfers and generations end."""
    world = cluster(*sizes, prefill=2, max_imports_per_replica=imports)
    for request_id, wanted in enumerate(blocks, 1):
        world.arrive(request_id, prompt=min(wanted, max(sizes) - 1) * BLOCK, max_tokens=BLOCK)
    for _ in range(10 * len(blocks)):
        moves = []
        for request in world.state.requests.values():
            if request.state is RequestState.PREFILLING:
                moves.append((world.first_token, request.id))
            elif request.lease_id:
                moves.append((world.imported, request.id))
            elif request.state is RequestState.DECODING:
                moves.append((world.ended, request.id))
        if not moves:
            break
        move, request_id = order.choice(moves)
        move(request_id)
    assert world.state.requests == {}


@given(
    count=st.integers(2, 6),
    blocks=st.lists(st.integers(1, 8), min_size=1, max_size=40),
    imports=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_equal_replicas_stay_within_the_largest_request_of_each_other(
    count: int, blocks: list[int], imports: int
) -> None:
    """Transfers end in the order of their start, and no request ends: greedy balancing."""
    world = cluster(*[1000] * count, max_imports_per_replica=imports)
    for request_id, wanted in enumerate(blocks, 1):
        put(world, request_id, wanted)
        world.imported(request_id)
        loads = [world.state.blocks_reserved(f"r{1 + i}") for i in range(count)]
        assert max(loads) - min(loads) <= max(blocks[:request_id])
