"""Live pairs of a real daemon: a replica serves while its weights arrive, and whatever dies or
leaves meanwhile, every request is answered once, with the tokens of a plain prefill."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, wait_for
from tests.e2e.live import (
    DECODE,
    KINDS,
    NEW,
    OLD,
    OPTIONS,
    Clients,
    Expected,
    answer,
    answers,
    back_to_spare,
    body,
    events,
    go_live,
    loaded_to,
    replica,
    serve_through_a_pair,
    settled,
    story,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    running = Daemon(tmp_path_factory.mktemp("node") / "state", *OPTIONS).start()
    try:
        running.ready()
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def expected(daemon: Daemon) -> Expected:
    return answers(daemon)


def test_requests_are_served_while_the_weights_arrive(daemon: Daemon, expected: Expected) -> None:
    serve_through_a_pair(daemon, expected, load_ms=2500)
    back_to_spare(daemon)


@pytest.mark.slow
def test_the_same_where_the_two_share_no_memory(state_dir: Path, expected: Expected) -> None:
    running = Daemon(state_dir, *OPTIONS, "--same-node", "ucx").start()
    try:
        running.ready()
        serve_through_a_pair(running, expected, load_ms=4000)
    finally:
        running.end()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [NEW, OLD, DECODE])
@pytest.mark.parametrize("layers", [0, 12, 28])
def test_a_kill_in_mid_load_loses_no_request(
    daemon: Daemon, expected: Expected, victim: str, layers: int
) -> None:
    with Clients(daemon) as clients:
        since = go_live(daemon, 4000)
        loaded_to(daemon, layers)
        pid = replica(daemon, victim)["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_for("its end", lambda: replica(daemon, victim)["pid"] != pid)
        wait_for("all to serve", lambda: settled(daemon), 60.0)
    count = clients.check(expected)
    print(f"{victim} at layer {layers}: {count} requests, {story(daemon, since)}")
    daemon.idle()
    back_to_spare(daemon)


@pytest.mark.slow
def test_what_new_cannot_run_layer_by_layer_goes_to_old(daemon: Daemon, expected: Expected) -> None:
    prompt, tokens = KINDS[1]
    scored = body(prompt, tokens) | {"echo": True, "logprobs": 1}
    plain = daemon.complete(**scored)["choices"]
    with Clients(daemon, 2) as clients:
        since = go_live(daemon, 4000)
        loaded_to(daemon, 5)
        during = daemon.complete(**scored)["choices"]
        wait_for("the pair's end", lambda: settled(daemon), 60.0)
    clients.check(expected)
    assert (during[0]["text"], during[0]["logprobs"]["tokens"]) == (
        *(plain[0]["text"], plain[0]["logprobs"]["tokens"]),
    )
    [returned] = events(daemon, since, "RequestReturned")
    assert "prompt_logprobs" in returned["payload"]["reason"]
    back_to_spare(daemon)


@pytest.mark.slow
def test_a_client_that_leaves_frees_both_sides(daemon: Daemon, expected: Expected) -> None:
    cancelled = daemon.state()["requests"]["cancelled"]
    with Clients(daemon) as clients:
        go_live(daemon, 3000)
        for layers in (1, 8, 16, 24):
            loaded_to(daemon, layers)
            asked = {"model": "smollm2-135m", "stream": True, **body(KINDS[0][0], 200)}
            with daemon.open("/v1/completions", asked) as stream:
                stream.readline()
        wait_for("the pair's end", lambda: settled(daemon), 60.0)
    clients.check(expected)
    assert daemon.idle()["requests"]["cancelled"] == cancelled + 4
    back_to_spare(daemon)


@pytest.mark.slow
def test_a_daemon_that_dies_in_mid_load_comes_back_without_a_pair(
    daemon: Daemon, expected: Expected
) -> None:
    go_live(daemon, 20_000)
    loaded_to(daemon, 5)
    old = replica(daemon, OLD)
    daemon.kill()
    daemon.start().ready()
    assert daemon.state()["pairs"] == []
    assert replica(daemon, OLD)["pid"] == old["pid"], "its weights are whole"
    assert answer(daemon, *KINDS[1]) == expected[KINDS[1]]
    back_to_spare(daemon)
