"""What is shown of requests is what there is, whatever became of them: reports of others
(reference: peers B.1 and B.4), each with its number."""

from collections.abc import Callable

import pytest

from blitzd.events import types as ev
from tests.control.harness import MS, Harness, refold

ENDS = ("finished", "failed", "cancelled", "rejected")
OPEN = ("queued", "prefilling", "migrating", "decoding")


def shown(world: Harness) -> dict[str, int]:
    counts: dict[str, int] = world.state.to_json()["requests"]
    return counts


def check_idle(world: Harness) -> None:
    state = world.state.to_json()
    assert [state["requests"][name] for name in OPEN] == [0, 0, 0, 0]
    assert state["queue"] == {"requests": 0, "tokens": 0}
    assert state["links"] == []
    assert all(r["inflight"] == r["blocks_reserved"] == 0 for r in state["replicas"])


def decoding(world: Harness, request_id: int) -> None:
    world.arrive(request_id)
    world.first_token(request_id)
    world.imported(request_id)


PATHS: dict[str, Callable[[Harness], object]] = {
    "rejected": lambda world: world.arrive(1, prompt=10**6),
    "cancelled": lambda world: (decoding(world, 1), world.feed(ev.ClientLeft(1))),
    "finished": lambda world: (decoding(world, 1), world.ended(1)),
    "failed": lambda world: (
        world.feed(ev.RequestArrived(1, 10, 10, 0, world.now + 100 * MS)),
        world.after(100),
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_every_path_out_leaves_nothing_in_flight(end: str) -> None:
    """B.1 #13: rejected requests leaked the running counter; so may cancels and time-outs."""
    world = Harness().serving("prefill", "decode")
    PATHS[end](world)
    check_idle(world)
    assert {name: shown(world)[name] for name in ENDS} == dict.fromkeys(ENDS, 0) | {end: 1}


def test_an_error_in_the_worker_takes_its_request_off_every_count() -> None:
    """B.1 #24: a count was not taken back on error paths."""
    world = Harness().serving("prefill", "decode")
    decoding(world, 1)
    world.feed(ev.RequestErrored("r1", 1, 1, "AssertionError: shapes differ"))
    check_idle(world)
    assert shown(world)["failed"] == 1


def test_a_request_that_is_over_before_anybody_looks_is_counted() -> None:
    """B.1 #22: a fast request finished between two evaluations, and its demand was never seen."""
    world = Harness().serving("prefill", "decode")
    before = world.now
    world.arrive(1, max_tokens=1)
    world.ended(1)
    assert world.now == before, "no time has passed, so no sample was taken"
    assert shown(world)["finished"] == 1
    assert sum(isinstance(r.payload, ev.RequestAccepted) for r in world.log) == 1


def test_after_all_have_left_every_gauge_is_zero() -> None:
    """B.4 #60: running 106 and waiting 15 for ever after all were aborted."""
    world = Harness(max_prefills_per_replica=4).serving("prefill", "decode")
    for request_id in range(1, 31):
        world.arrive(request_id, prompt=20, max_tokens=20)
    for request_id in (1, 2, 3):
        world.first_token(request_id)
    world.imported(1)
    assert all(shown(world)[name] > 0 for name in OPEN)
    for request_id in range(1, 31):
        world.feed(ev.ClientLeft(request_id))
    check_idle(world)
    assert shown(world)["cancelled"] == 30, "B.4 #62: cancelled ones were invisible"


def test_a_gauge_is_the_size_of_a_set() -> None:
    """B.4 #61: one inc for seven decs. Each notice twice, and gauges are what there is."""
    world = Harness().serving("prefill", "decode")
    for request_id in (1, 2, 3):
        decoding(world, request_id)
    for _ in range(2):
        world.feed(ev.ClientLeft(1))
        world.feed(ev.GenerationEnded("r1", 1, 2, "stop", 5, "00"))
        world.feed(ev.RequestErrored("r1", 1, 3, "NaN"))
        world.feed(ev.FirstTokenProduced("r0", 1, 3))
    check_idle(world)
    assert [shown(world)[name] for name in ENDS] == [1, 1, 1, 0]


def test_all_that_came_in_came_out_whatever_died_meanwhile() -> None:
    """B.4 #62 and #66: ends add up to arrivals, always."""
    world = Harness(max_queued_requests=4, max_resumes=1).serving("prefill", "decode", "decode")
    arrived = 0
    for _ in range(5):
        for _ in range(6):
            arrived += 1
            world.arrive(arrived, prompt=60)
            assert sum(shown(world).values()) == arrived
        for request in list(world.state.requests.values()):
            if request.state == "prefilling":
                world.first_token(request.id)
        for replica in list(world.state.replicas.values()):
            world.feed(ev.WorkerExited(replica.id, replica.epoch, "killed"))
            assert sum(shown(world).values()) == arrived
            world.after(40_000)
            world.attach(replica.id)
            world.load(replica.id)
    for request_id in list(world.state.requests):
        world.feed(ev.ClientLeft(request_id))
    check_idle(world)
    assert sum(shown(world)[name] for name in ENDS) == arrived


def test_gauges_are_rebuilt_from_the_log() -> None:
    """B.4 #63: a kill left a gauge stuck. The next start's are those of the log, and what the
    dead daemon had open has ended by then."""
    world = Harness().serving("prefill", "decode")
    for request_id in (1, 2):
        decoding(world, request_id)
    assert refold(world.log).to_json() == world.state.to_json()
    world.boot("prefill", "decode")
    check_idle(world)
    assert shown(world)["failed"] == 2


def test_an_old_epochs_notices_count_for_nobody() -> None:
    """B.4 #70: deregistered in flight, the counter went below zero."""
    world = Harness().serving("prefill", "decode")
    decoding(world, 1)
    world.feed(ev.WorkerExited("r1", 1, "killed"))
    world.attach("r1")
    world.load("r1")
    world.first_token(1)
    world.imported(1)
    for notice in (
        ev.GenerationEnded("r1", 1, 1, "stop", 5, "00"),
        ev.RequestErrored("r1", 1, 1, "late"),
        ev.WorkerExited("r1", 1, "again"),
        ev.OccupancyReported("r1", 1, 9, 9),
    ):
        [event] = world.feed(notice)
        assert isinstance(event, ev.StaleNoticeIgnored)
    replica = world.state.to_json()["replicas"][1]
    assert (replica["inflight"], replica["blocks_used"]) == (1, 0)


def test_a_slow_start_is_no_failed_start() -> None:
    """B.1 #20: starts of twenty minutes were killed at ten, and requests that waited with them."""
    world = Harness()
    world.boot("prefill", "decode")
    world.feed(ev.RequestArrived(1, 10, 10, 0, 3600 * 1000 * MS))
    world.attach("r0")
    world.attach("r1")
    world.after(20 * 60 * 1000)
    assert world.request_state(1) == "queued"
    assert [r["failures"] for r in world.state.to_json()["replicas"]] == [0, 0]
    world.load("r0")
    world.load("r1")
    assert world.request_state(1) == "prefilling"
