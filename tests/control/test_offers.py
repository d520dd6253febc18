"""Who gets a request, whatever the order in which replicas were configured."""

from blitzd.control.core import CORE_VERSION
from blitzd.events import types as ev
from tests.control.harness import Harness, only


def configured(*replicas: tuple[str, str]) -> Harness:
    world = Harness()
    policy = world.policy.pairs()
    world.feed(ev.Booted(1, "test", "local", replicas, policy, CORE_VERSION))
    for pid, (replica, _) in enumerate(replicas, 100):
        world.attach(replica, pid)
        world.load(replica)
    return world


def test_of_equals_the_smallest_id_is_taken() -> None:
    world = configured(("b", "prefill"), ("a", "prefill"), ("d", "decode"), ("c", "decode"))
    assert only(world.arrive(1), ev.PrefillStarted).replica == "a"
    assert only(world.first_token(1), ev.MigrationStarted).target == "c"


def test_the_least_loaded_goes_before_the_smallest_id() -> None:
    world = configured(("a", "prefill"), ("b", "prefill"), ("c", "decode"), ("d", "decode"))
    world.arrive(1, prompt=500)
    assert only(world.arrive(2, prompt=10), ev.PrefillStarted).replica == "b"
    assert only(world.arrive(3, prompt=10), ev.PrefillStarted).replica == "b", "10 are under way"
    assert only(world.first_token(1), ev.MigrationStarted).target == "c"
    assert only(world.first_token(2), ev.MigrationStarted).target == "d"
