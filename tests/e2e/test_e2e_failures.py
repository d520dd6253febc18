"""What happens when processes die: workers, the daemon, all at once."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from blitzd.node.paths import runtime_dir
from tests.e2e.daemon import BLITZD, Daemon, blitzd_json, wait_for, worker_pids


@pytest.fixture
def fresh(state_dir: Path) -> Iterator[Daemon]:
    running = Daemon(state_dir, "--spare", "0")
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Whoever uses it leaves it serving."""
    running = Daemon(tmp_path_factory.mktemp("one") / "state", "--spare", "0").start()
    try:
        running.ready()
        yield running
    finally:
        running.end()


LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_a_killed_worker_is_replaced_and_its_request_goes_on(one: Daemon, role: str) -> None:
    body = LONG | {"max_tokens": 90}
    undisturbed = one.complete(**body)["choices"][0]["text"]
    seen: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: seen.extend(one.stream("/v1/completions", body)))
    client.start()
    wait_for("it decodes", lambda: one.state()["requests"]["decoding"] == 1)
    since, victim = one.state()["seq"], one.replica(role)
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for("the new worker", lambda: one.replica(role)["epoch"] == victim["epoch"] + 1)
    [lost] = [e for e in one.events() if e["type"] == "WorkerLost" and e["seq"] > since]
    assert lost["payload"]["replica"] == victim["id"]
    assert "SIGKILL" in lost["payload"]["reason"]
    client.join(90)
    assert seen[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(event["choices"][0]["text"] for event in seen) == undisturbed
    # Once its KV has left the prefill replica, that one's death is nothing to it.
    resumed = [e for e in one.events() if e["type"] == "RequestResumed" and e["seq"] > since]
    assert [e["payload"]["replica"] for e in resumed] == [victim["id"]] * (role == "decode")
    one.ready()
    assert one.complete(prompt="Hello", max_tokens=4, temperature=0)["choices"][0]["text"]
    one.idle()


def test_a_death_is_known_within_a_tenth_of_a_second(one: Daemon) -> None:
    noticed_ms = []
    for _ in range(3):
        wait_for("a worker", lambda: one.replica("decode")["worker"] == "attached")
        victim = one.replica("decode")
        killed_ns = time.time_ns()
        os.kill(victim["pid"], signal.SIGKILL)
        epoch = victim["epoch"]
        wait_for("its end", lambda epoch=epoch: one.replica("decode")["epoch"] > epoch)
        lost = [e for e in one.events() if e["type"] == "WorkerLost"][-1]
        noticed_ms.append((lost["wall_ns"] - killed_ns) / 1e6)
        name = f"{victim['id']}-{victim['epoch']}"
        assert not list(runtime_dir(one.state_dir).glob(f"{name}.*")), "a socket is left"
    print(f"noticed after {noticed_ms} ms")
    # Other tenants may hold up a daemon once; they do not hold up the median.
    assert sorted(noticed_ms)[1] < 100


def test_a_killed_daemon_comes_back_to_its_workers(one: Daemon) -> None:
    one.ready()
    before = {r["id"]: (r["epoch"], r["pid"]) for r in one.state()["replicas"]}
    one.kill()
    verified = blitzd_json("log", "verify", str(one.state_dir))
    assert verified["ok"], verified
    one.start().ready()
    after = {r["id"]: (r["epoch"], r["pid"]) for r in one.state()["replicas"]}
    assert after == before, "workers that still served were started anew"
    assert one.complete(prompt="Hello", max_tokens=4, temperature=0)["choices"][0]["text"]


def test_a_daemon_killed_while_it_loads_starts_again(fresh: Daemon) -> None:
    for attempt in range(3):
        fresh.start()
        wait_for("its log", lambda: any(fresh.state_dir.glob("log/*.log")))
        time.sleep(0.4 * (attempt + 1))
        fresh.kill()
        assert blitzd_json("log", "verify", str(fresh.state_dir))["ok"]
    fresh.start().ready()
    assert fresh.complete(prompt="Hello", max_tokens=4, temperature=0)["choices"][0]["text"]
    wait_for("old workers to go", lambda: len(worker_pids(fresh.state_dir)) == 2)


def test_sigterm_finishes_what_runs_and_leaves_no_process(fresh: Daemon) -> None:
    fresh.start().ready()
    seen: list[dict[str, Any]] = []
    body = LONG | {"max_tokens": 60}
    client = threading.Thread(target=lambda: seen.extend(fresh.stream("/v1/completions", body)))
    client.start()
    wait_for("it decodes", lambda: fresh.state()["requests"]["decoding"] == 1)
    assert fresh.process is not None
    fresh.process.send_signal(signal.SIGTERM)
    wait_for("draining", lambda: fresh.get_status("/health") == 503)
    with pytest.raises(urllib.error.HTTPError) as refused:
        fresh.complete(prompt="Hello", max_tokens=1)
    assert refused.value.code == 503
    assert b"shutting down" in refused.value.read()
    client.join(60)
    assert seen[-1]["choices"][0]["finish_reason"] == "length"
    assert fresh.process.wait(30) == 0
    assert worker_pids(fresh.state_dir) == []
    replayed = blitzd_json("replay", str(fresh.state_dir), "--state")
    assert replayed["node"]["phase"] == "stopped"
    assert replayed["requests"]["finished"] == 1


def test_what_would_collide_is_refused_by_name_and_the_first_daemon_is_not_disturbed(
    one: Daemon, tmp_path: Path
) -> None:
    """B.1 #12: two controllers of one thing disagree, and it flaps. The same state directory
    names the process that has it, a taken port the port."""
    one.ready()
    assert one.process is not None
    other = tmp_path / "other"
    for state_dir, port, named in (
        (one.state_dir, Daemon(other).port, one.process.pid),
        (other, one.port, one.port),
    ):
        argv = [*BLITZD, "up", "--state-dir", str(state_dir), "--port", str(port)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert re.search(rf"\b{named}\b", done.stderr), done.stderr
        assert one.get_status("/ready") == 200
    assert worker_pids(other) == []


def test_from_the_second_start_on_it_is_ready_within_six_seconds(fresh: Daemon) -> None:
    fresh.start().ready()
    took = []
    while len(took) < 3 and min(took, default=6.0) >= 6.0:
        assert fresh.stop() == 0
        started = time.monotonic()
        fresh.start().ready()
        took.append(time.monotonic() - started)
    print(f"ready after {took} s")
    assert min(took) < 6.0


@pytest.mark.parametrize(
    "kills", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_no_event_that_was_shown_is_lost_when_the_daemon_is_killed_under_load(
    fresh: Daemon, kills: int
) -> None:
    random = Random(kills)
    seen: dict[int, str] = {}
    for _ in range(kills):
        fresh.start().ready()
        clients = [
            threading.Thread(target=ignore_errors, args=(fresh.complete,), kwargs=LONG)
            for _ in range(3)
        ]
        for client in clients:
            client.start()
        time.sleep(random.uniform(0.1, 1.0))
        shown = fresh.events()
        fresh.kill()
        for client in clients:
            client.join(30)
        seen |= {event["seq"]: json.dumps(event) for event in shown}
        verified = blitzd_json("log", "verify", str(fresh.state_dir))
        assert verified["ok"], verified
        assert verified["last_seq"] >= max(seen)
    fresh.start().ready()
    kept = {event["seq"]: json.dumps(event) for event in fresh.events()}
    assert all(kept[seq] == event for seq, event in seen.items())
    # What was running when the daemon died has ended, with the reason.
    assert fresh.idle()["requests"]["failed"] == fresh.state()["requests"]["failed"] > 0


def ignore_errors(call: Callable[..., Any], **arguments: Any) -> None:
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        call(**arguments)
