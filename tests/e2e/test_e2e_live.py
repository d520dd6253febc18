"""Live pairs of a real daemon: a replica serves while its weights arrive, and whatever dies or
leaves meanwhile, every request is answered once, with the tokens of a plain prefill."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.daemon import Daemon, wait_for
from tests.e2e.live import (
    DECODE,
    KINDS,
    LAYERS,
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
    tell,
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
@pytest.mark.parametrize(
    ("layers", "how"),
    [*((layers, signal.SIGKILL) for layers in (0, 12, 28)), (12, signal.SIGSTOP)],
    ids=["killed-0", "killed-12", "killed-28", "stopped-12"],
)
def test_a_death_in_mid_load_loses_no_request(
    daemon: Daemon, expected: Expected, victim: str, layers: int, how: signal.Signals
) -> None:
    with Clients(daemon) as clients:
        since = go_live(daemon, 4000)
        loaded_to(daemon, layers)
        pid = replica(daemon, victim)["pid"]
        os.kill(pid, how)
        wait_for("its end", lambda: replica(daemon, victim)["pid"] != pid)
        wait_for("all to serve", lambda: settled(daemon), 60.0)
    count = clients.check(expected)
    print(f"{how.name} of {victim} at layer {layers}: {count} requests, {story(daemon, since)}")
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


@pytest.mark.slow
def test_a_source_that_dies_is_replaced_and_the_pair_goes_on(
    state_dir: Path, expected: Expected
) -> None:
    """Two replicas load in a chain, of which the tail is live; it loses the one before it."""
    options = ("--spare", "2", "--set", "policy.ladder_live=1", *OPTIONS[2:])
    running = Daemon(state_dir, *options).start()
    try:
        running.ready()
        tell(running, "/admin/policy", {"mock_transfer_ms": 6000, "ladder_map": 0})
        since = running.state()["seq"]
        with Clients(running) as clients:
            tell(running, "/admin/scale", {"prefill": 3, "decode": 1})
            wait_for("the pair", lambda: bool(running.state()["pairs"]))
            [pair] = running.state()["pairs"]
            [opened] = events(running, since, "PairOpened")
            middle = opened["payload"]["peers"][0][0]
            assert (pair["old"], middle in (NEW, "r3")) == (OLD, True)
            loaded_to(running, 8, pair["new"])
            os.kill(replica(running, middle)["pid"], signal.SIGKILL)
            wait_for("all to serve", lambda: settled(running), 60.0)
        clients.check(expected)
        print(story(running, since))
        assert [e["payload"]["pair_id"] for e in events(running, since, "PairSettled")] == [1]
        assert not events(running, since, "PairBroken")
        running.idle()
    finally:
        running.end()


@pytest.mark.slow
def test_a_daemon_that_is_stopped_in_mid_load_finishes_what_runs(
    state_dir: Path, expected: Expected
) -> None:
    running = Daemon(state_dir, *OPTIONS).start()
    try:
        running.ready()
        go_live(running, 20_000)
        loaded_to(running, 5)
        with ThreadPoolExecutor(len(KINDS)) as threads:
            asked = {kind: threads.submit(answer, running, *kind) for kind in KINDS}
            wait_for("all to be there", lambda: arrived(running) == len(KINDS), 10.0)
            assert running.stop() == 0
            assert {kind: text.result() for kind, text in asked.items()} == expected
    finally:
        running.end()


def arrived(daemon: Daemon) -> int:
    requests: dict[str, int] = daemon.state()["requests"]
    return sum(requests.values())


@pytest.mark.slow
def test_a_decode_replica_is_had_at_once_and_its_successor_serves_while_it_loads(
    state_dir: Path, expected: Expected
) -> None:
    """A prefill replica takes the role, and a live one takes its place."""
    ladder = ("--set", "policy.ladder_live=1", "--set", "policy.ladder_live_decode=1")
    running = Daemon(state_dir, *OPTIONS, "--prefill", "2", *ladder).start()
    try:
        running.ready()
        tell(running, "/admin/policy", {"mock_transfer_ms": 5000, "ladder_map": 0})
        since = running.state()["seq"]
        with Clients(running) as clients:
            tell(running, "/admin/scale", {"prefill": 2, "decode": 2})
            decodes = (r["id"] for r in running.state()["replicas"] if r["role"] == "decode")
            mutated = next(name for name in decodes if name != "r2")
            took = wait_for("it decodes", lambda: replica(running, mutated)["state"] == "Decode")
            [pair] = running.state()["pairs"]
            assert replica(running, pair["new"])["layers_ready"] < LAYERS
            wait_for("all to serve", lambda: settled(running), 60.0)
        clients.check(expected)
        print(f"{mutated} decodes after {took:.1f} s; {story(running, since)}")
        assert events(running, since, "PairSettled")
        states = [r["state"] for r in running.state()["replicas"]]
        assert sorted(states) == ["Decode", "Decode", "Prefill", "Prefill"]
        running.idle()
    finally:
        running.end()
