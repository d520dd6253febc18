"""A drained decode replica hands on what it decodes: the streams do not notice."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import Daemon, wait_for

PROMPTS = ("Once upon a time", "The capital of France is", "A list of animals:")


@pytest.fixture
def served(state_dir: Path, same_node: str) -> Iterator[Daemon]:
    options = ("--decode", "2", "--spare", "0", "--same-node", same_node)
    running = Daemon(state_dir, *options).start()
    try:
        running.ready()
        yield running
    finally:
        running.end()


def text_of(daemon: Daemon, prompt: str, found: dict[str, str]) -> None:
    body = {"prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    chunks: list[dict[str, Any]] = list(daemon.stream("/v1/completions", body))
    assert "error" not in chunks[-1], chunks[-1]
    found[prompt] = "".join(c["choices"][0]["text"] for c in chunks if c["choices"])


def ask_all(daemon: Daemon, found: dict[str, str]) -> list[threading.Thread]:
    clients = [threading.Thread(target=text_of, args=(daemon, p, found)) for p in PROMPTS]
    for client in clients:
        client.start()
    return clients


@pytest.mark.parametrize("same_node", ["map", pytest.param("ucx", marks=pytest.mark.slow)])
def test_streams_go_on_exactly_while_their_replica_is_drained(served: Daemon) -> None:
    expected: dict[str, str] = {}
    for client in ask_all(served, expected):
        client.join(120)
    found: dict[str, str] = {}
    clients = ask_all(served, found)
    wait_for("all decode", lambda: served.state()["requests"]["decoding"] == len(PROMPTS))
    busy = max(
        (r for r in served.state()["replicas"] if r["role"] == "decode"),
        key=lambda r: r["inflight"],
    )
    url = f"http://127.0.0.1:{served.admin_port}/admin/replicas/{busy['id']}/drain"
    command = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
    with urllib.request.urlopen(command, timeout=30) as answer:
        assert answer.status == 200, json.load(answer)

    def drained() -> bool:
        shown = next(r for r in served.state()["replicas"] if r["id"] == busy["id"])
        return bool(shown["inflight"] == 0)

    took = wait_for("the drained one is empty", drained)
    assert served.state()["requests"]["decoding"] == len(PROMPTS), "none has ended meanwhile"
    print(f"{busy['inflight']} requests moved within {took * 1e3:.0f} ms")
    for client in clients:
        client.join(120)
    assert found == expected
    steps = [e["payload"]["step"] for e in served.events() if e["type"] == "RequestMoving"]
    assert steps.count("held") == busy["inflight"] > 0
    assert "RequestResumed" not in {e["type"] for e in served.events()}
    served.idle()
