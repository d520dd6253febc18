"""Planned changes under load lose nothing: drains, changes of role, restarts, by the CLI."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import BLITZD, Daemon, blitzd_json, wait_for, worker_pids
from tests.e2e.streams import Streams


@pytest.fixture
def changing(state_dir: Path) -> Iterator[Daemon]:
    running = Daemon(state_dir, "--prefill", "2", "--decode", "3", "--spare", "0")
    try:
        running.start().ready()
        wait_for("all to serve", lambda: serving(running) == 5, 60)
        yield running
    finally:
        running.end()


def serving(daemon: Daemon) -> int:
    return sum(r["state"] in ("Prefill", "Decode") for r in daemon.state()["replicas"])


def verb(daemon: Daemon, *argv: str) -> dict[str, Any]:
    """By the CLI, over the unix socket."""
    argv = (*argv, "--json", "--state-dir", str(daemon.state_dir))
    done = subprocess.run([*BLITZD, *argv], capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def drain_times_ms(daemon: Daemon) -> list[float]:
    """From the decision to the last request's end, as the log has them."""
    began: dict[str, int] = {}
    took = []
    for event in daemon.events():
        if event["type"] == "ShutdownStarted":
            began[event["payload"]["replica"]] = event["mono_ns"]
        elif event["type"] == "ReplicaEmptied":
            took.append((event["mono_ns"] - began.pop(event["payload"]["replica"])) / 1e6)
    assert not began, "a drain has no end"
    return took


def change_everything(daemon: Daemon) -> None:
    epochs = {r["id"]: r["epoch"] for r in daemon.state()["replicas"]}
    verb(daemon, "scale", "--decode", "1", "--wait")
    verb(daemon, "mutate", "r1", "decode", "--wait")
    verb(daemon, "mutate", "r1", "prefill", "--wait")
    verb(daemon, "restart", "--all", "--wait", "--timeout", "550")
    replicas = daemon.state()["replicas"]
    assert {r["id"]: r["epoch"] - 1 for r in replicas} == epochs, "each has one new worker"
    verb(daemon, "scale", "--decode", "3", "--wait")


def test_no_change_of_replicas_loses_or_alters_a_stream(changing: Daemon) -> None:
    """B.1 #1: a scale-down aborted what was in flight. Zero failed, all tokens, drain times
    in the log; and so for changes of role and a rolling restart."""
    with Streams(changing, clients=8, tokens=24) as streams:
        change_everything(changing)
    streams.check()
    took = drain_times_ms(changing)
    print(f"{len(streams.done)} streams; drains took {[round(ms) for ms in took]} ms")
    assert len(took) >= 5
    assert max(took) > 50, "none of them had anything to finish"
    assert not [e for e in changing.events() if e["type"] == "WorkerLost"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nor_do_many_of_them_under_long_streams(changing: Daemon) -> None:
    """The same with streams that are longer than a restart takes."""
    with Streams(changing, clients=8, tokens=120) as streams:
        for _ in range(2):
            change_everything(changing)
    streams.check()
    took = drain_times_ms(changing)
    print(f"{len(streams.done)} streams; drains took {[round(ms) for ms in took]} ms")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Whoever uses it leaves both replicas serving."""
    running = Daemon(tmp_path_factory.mktemp("pair") / "state", "--spare", "0").start()
    try:
        running.ready()
        yield running
    finally:
        running.end()


@pytest.fixture
def fresh(state_dir: Path) -> Iterator[Daemon]:
    running = Daemon(state_dir, "--spare", "0")
    try:
        yield running.start()
    finally:
        running.end()


def test_requests_wait_for_the_only_one_of_a_role_while_it_restarts(pair: Daemon) -> None:
    with Streams(pair, clients=2, tokens=8) as streams:
        verb(pair, "restart", "--all", "--wait", "--timeout", "110")
    streams.check()


def test_a_worker_that_does_not_end_is_killed_and_the_next_one_serves(pair: Daemon) -> None:
    """B.4 #67: "timed out waiting to stop", then errors until a restart. B.4 #68: half-failed,
    memory not freed, a zombie child."""
    since, victim = pair.state()["seq"], pair.replica("decode")
    os.kill(victim["pid"], signal.SIGSTOP)  # SIGTERM stays pending
    verb(pair, "restart", victim["id"], "--wait", "--timeout", "60")
    events = [e for e in pair.events() if e["seq"] > since]
    [stopped] = [e["payload"] for e in events if e["type"] == "WorkerStopped"]
    assert (stopped["replica"], stopped["how"]) == (victim["id"], "killed by SIGKILL")
    assert not Path(f"/proc/{victim['pid']}").exists(), "a zombie is left"
    assert len(worker_pids(pair.state_dir)) == 2
    assert pair.complete(prompt="Hello", max_tokens=4, temperature=0)["choices"][0]["text"]


def test_it_starts_without_a_worker_and_holds_requests_until_one_serves(fresh: Daemon) -> None:
    """B.4 #69: the router refused to start unless all workers were healthy."""
    wait_for("its routes", lambda: fresh.get_status("/live") == 200)
    assert fresh.get_status("/ready") == 503
    answer = fresh.complete(prompt="Hello", max_tokens=4, temperature=0)
    assert answer["usage"]["completion_tokens"] == 4


def test_a_killed_daemon_goes_on_with_the_restart_it_had_begun(fresh: Daemon) -> None:
    fresh.ready()
    argv = [*BLITZD, "restart", "--all", "--json", "--state-dir", str(fresh.state_dir)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    time.sleep(0.5)
    fresh.kill()
    fresh.start().ready()
    wait_for("both to be new", lambda: rolled(fresh), 90)
    ended = [e["payload"] for e in fresh.events() if e["type"] == "RollingRestartEnded"]
    assert ended == [{"reason": ""}]
    verified = blitzd_json("replay", str(fresh.state_dir), "--state")
    assert verified["hash"] == json.loads(json.dumps(fresh.state()))["hash"]


def rolled(daemon: Daemon) -> bool:
    state = daemon.state()
    replicas = state["replicas"]
    done = not state["node"]["rolling_restart"] and not any(r["restarting"] for r in replicas)
    return done and all(r["epoch"] > 1 for r in replicas)
