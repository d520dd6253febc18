"""Replicas that get their weights from replicas: exact tokens afterwards, whoever is killed."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import Daemon, wait_for

PROMPT = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    state_dir: Path = tmp_path_factory.mktemp("node") / "state"
    options = ("--spare", "3", "--kv-mib", "64", "--set", "policy.null_ttl_ms=1")
    options += ("--set", "policy.ladder_nvlink=0")
    running = Daemon(state_dir, *options, "--set", "policy.ladder_map=0").start()
    try:
        running.ready()
        yield running
    finally:
        running.end()


def scale(daemon: Daemon, prefill: int, decode: int) -> None:
    url = f"http://127.0.0.1:{daemon.admin_port}/admin/scale"
    body = json.dumps({"prefill": prefill, "decode": decode}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


def replicas(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {replica["id"]: replica for replica in daemon.state()["replicas"]}


def wait_serving(daemon: Daemon, count: int) -> None:
    def serving() -> int:
        return sum(r["state"] == "Decode" for r in replicas(daemon).values())

    wait_for(f"{count} decodes", lambda: serving() == count, 60.0)


def texts(daemon: Daemon, count: int) -> set[str]:
    """Of as many equal requests at once, which all the decode replicas share."""
    with ThreadPoolExecutor(count) as threads:
        answers = list(threads.map(lambda _: daemon.complete(**PROMPT), range(count)))
    return {answer["choices"][0]["text"] for answer in answers}


def chain_of(daemon: Daemon, since: int) -> dict[str, str]:
    """Who was told to load from whom."""
    return {
        event["payload"]["replica"]: event["payload"]["source"]
        for event in daemon.events()
        if event["type"] == "LoadStarted" and event["seq"] > since
    }


def test_spares_load_in_a_chain_from_a_decode_and_then_serve_the_same_tokens(
    daemon: Daemon,
) -> None:
    [expected] = texts(daemon, 1)
    since = daemon.state()["seq"]
    source = daemon.replica("decode")["id"]
    scale(daemon, 1, 3)
    wait_serving(daemon, 3)
    chain = chain_of(daemon, since)
    first = next(target for target, giver in chain.items() if giver == source)
    [second] = set(chain) - {first}
    assert chain == {first: source, second: first}
    finished = {
        e["payload"]["replica"]: e["payload"]["source"]
        for e in daemon.events()
        if e["type"] == "LoadFinished" and e["seq"] > since
    }
    assert finished == chain
    assert texts(daemon, 12) == {expected}
    scale(daemon, 1, 1)
    wait_serving(daemon, 1)
    wait_for("their weights to go", lambda: idle(daemon) == 3)


def idle(daemon: Daemon) -> int:
    return sum(r["state"] == "Inactive" for r in replicas(daemon).values())


@pytest.mark.slow
@pytest.mark.parametrize("position", ["source", "middle", "last"])
def test_a_kill_in_mid_transfer_leaves_nobody_stuck_and_no_wrong_weights(
    daemon: Daemon, position: str
) -> None:
    wait_serving(daemon, 1)
    wait_for("spares", lambda: idle(daemon) == 3)
    [expected] = texts(daemon, 1)
    since = daemon.state()["seq"]
    source = daemon.replica("decode")["id"]
    scale(daemon, 1, 3)

    def moving() -> bool:
        loading = [r for r in replicas(daemon).values() if r["state"] == "LoadingDecode"]
        return len(loading) == 2 and all(r["layers_ready"] >= 2 for r in loading)

    wait_for("both to load", moving)
    links = {link["source"]: link["target"] for link in daemon.state()["links"]}
    middle = links[source]
    victim = {"source": source, "middle": middle, "last": links[middle]}[position]
    pid = replicas(daemon)[victim]["pid"]
    os.kill(pid, signal.SIGKILL)
    took = wait_for("its end", lambda: replicas(daemon)[victim]["pid"] != pid)
    wait_serving(daemon, 3)
    events = [e for e in daemon.events() if e["seq"] > since]
    story = [e["type"] for e in events if e["type"] in ("LoadFailed", "WorkerLost")]
    print(f"{position}: {victim} noticed after {took * 1e3:.0f} ms, {story}")
    assert texts(daemon, 12) == {expected}
    assert all(r["trouble"] == "" for r in replicas(daemon).values() if r["state"] == "Decode")
    scale(daemon, 1, 1)
    wait_serving(daemon, 1)


@pytest.mark.slow
def test_with_prefills_alone_a_spare_keeps_the_weights_and_the_next_decode_gets_them_there(
    daemon: Daemon,
) -> None:
    wait_serving(daemon, 1)
    wait_for("spares", lambda: idle(daemon) == 3)
    [expected] = texts(daemon, 1)
    since = daemon.state()["seq"]
    victim = daemon.replica("decode")
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for("its end", lambda: replicas(daemon)[victim["id"]]["pid"] != victim["pid"])
    wait_serving(daemon, 1)
    events = [e for e in daemon.events() if e["seq"] > since]
    told = {e["type"]: e["payload"] for e in events if e["type"].startswith("PoolCopy")}
    started = [e["payload"] for e in events if e["type"] == "LoadStarted"]
    keeper = told["PoolCopyAssigned"]["replica"]
    assert told["PoolCopyHeld"]["bytes_total"] == replicas(daemon)[victim["id"]]["bytes_total"]
    assert [(load["rung"], load["source"]) for load in started] == [("pool", keeper)]
    wait_for("the copy to go", lambda: not replicas(daemon)[keeper]["pooled"])
    assert texts(daemon, 4) == {expected}
