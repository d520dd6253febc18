"""The node is told to stop while replicas change: what was accepted is served all the same."""

import pytest

from blitzd.control.commands import ShutDown
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm import ReplicaState
from tests.control.harness import MS, Harness, RequestState, only

S = ReplicaState


def decoding(world: Harness, request_id: int) -> None:
    world.arrive(request_id)
    world.first_token(request_id)
    world.imported(request_id)


@pytest.mark.parametrize("command", [ev.RestartRequested("r1", 0), ev.RollingRestartRequested(0)])
def test_a_restart_that_the_stop_calls_off_keeps_nobody_waiting(command: Payload) -> None:
    """The only decode replica finishes one request for its restart; another waits for it."""
    world = Harness().serving("prefill", "decode")
    decoding(world, 1)
    world.arrive(2)
    world.feed(command)
    world.first_token(2)
    assert world.replica("r1").state is S.SHUTTING_DECODE
    assert world.request_state(2) is RequestState.MIGRATING
    world.feed(ev.StopRequested("SIGTERM", 30_000 * MS))
    world.ended(1)
    world.imported(2)
    events = world.ended(2)
    only(events, ev.RequestFinished)
    assert only(events, ev.NodeStopped).reason == "drained"
    assert world.commanded(ShutDown)


def test_a_worker_that_was_told_to_end_is_replaced_for_what_is_still_to_serve() -> None:
    world = Harness().serving("prefill", "decode")
    world.arrive(1)
    world.feed(ev.RestartRequested("r1", 0))
    world.first_token(1)
    assert world.replica("r1").worker == "stopping"
    world.feed(ev.StopRequested("SIGTERM", 30_000 * MS))
    world.feed(ev.WorkerExited("r1", 1, "exited with status 0"))
    world.attach("r1")
    world.load("r1")
    world.imported(1)
    assert only(world.ended(1), ev.NodeStopped).reason == "drained"
