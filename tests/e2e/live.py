"""A daemon with a live pair: the load is slow, so that there is time to do something in it."""

import itertools
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.daemon import Daemon, wait_for

PACED = ("--set", "engine.pace_layer_ms=2")
POLICY = (
    *("--set", "policy.null_ttl_ms=1", "--set", "policy.ladder_nvlink=0"),
    *("--set", "policy.kv_checksum_every=1"),
)
OPTIONS = ("--spare", "1", "--kv-mib", "64", *PACED, *POLICY)
NEW, OLD, DECODE = "r2", "r0", "r1"
LAYERS = 30
Expected = dict[tuple[str, int], str]
"""The text of each kind of request."""
OUTPUT_TOKENS = (1, 2, 4)
"""In turns: those that end with their first token, and those whose KV is handed on."""
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village,",
    "def fibonacci(n):",
    "To bake bread you need",
]
KINDS = [(prompt, tokens) for prompt in PROMPTS for tokens in OUTPUT_TOKENS]
"""Of requests."""


def body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def answer(daemon: Daemon, prompt: str, tokens: int) -> str:
    text: str = daemon.complete(**body(prompt, tokens))["choices"][0]["text"]
    return text


def answers(daemon: Daemon) -> Expected:
    """Of plain prefills."""
    with ThreadPoolExecutor(len(KINDS)) as threads:
        return dict(zip(KINDS, threads.map(lambda kind: answer(daemon, *kind), KINDS), strict=True))


def tell(daemon: Daemon, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{daemon.admin_port}{path}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(asked).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as reply:
        said: dict[str, Any] = json.load(reply)
        return said


def replica(daemon: Daemon, name: str) -> dict[str, Any]:
    found: dict[str, Any] = daemon.admin(f"/admin/replicas/{name}")
    return found


def go_live(daemon: Daemon, load_ms: int, new: str = NEW) -> int:
    """The log's end before that."""
    tell(daemon, "/admin/policy", {"mock_transfer_ms": load_ms, "ladder_map": 0})
    wait_for("a spare", lambda: replica(daemon, new)["worker"] == "attached")
    since: int = daemon.state()["seq"]
    tell(daemon, f"/admin/replicas/{new}/live", {"old": OLD})
    return since


def loaded_to(daemon: Daemon, layers: int, new: str = NEW) -> None:
    wait_for(f"layer {layers}", lambda: replica(daemon, new)["layers_ready"] >= layers)


def settled(daemon: Daemon) -> bool:
    """No pair, and everybody serves as what it is."""
    serving = {"prefill": "Prefill", "decode": "Decode", "spare": "Inactive"}
    state = daemon.state()
    there = all(r["state"] == serving[r["role"]] for r in state["replicas"])
    return there and not state["pairs"] and all(r["pid"] for r in state["replicas"])


def back_to_spare(daemon: Daemon) -> None:
    """As it began."""
    wait_for("the pair's end", lambda: settled(daemon), 60.0)
    tell(daemon, f"/admin/replicas/{NEW}/mutate", {"role": "spare"})
    wait_for("its weights to go", lambda: replica(daemon, NEW)["state"] == "Inactive")
    tell(daemon, "/admin/policy", {"mock_transfer_ms": 0, "ladder_map": 1})


def events(daemon: Daemon, since: int, kind: str) -> list[dict[str, Any]]:
    return [e for e in daemon.events() if e["seq"] > since and e["type"] == kind]


class Clients:
    """So many at once, each with one request after the other until it is left."""

    def __init__(self, daemon: Daemon, count: int = 8) -> None:
        self._daemon = daemon
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(count)
        self._answers: list[tuple[tuple[str, int], str]] = []
        self._numbers = itertools.count()
        self._asking = [self._threads.submit(self._ask) for _ in range(count)]

    def _ask(self) -> None:
        while not self._over.is_set():
            kind = KINDS[next(self._numbers) % len(KINDS)]
            self._answers.append((kind, answer(self._daemon, *kind)))

    def __enter__(self) -> "Clients":
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown()

    def check(self, expected: Expected) -> int:
        """How many requests there were, each answered with the tokens of a plain prefill."""
        for asking in self._asking:
            asking.result()
        for kind, text in self._answers:
            assert text == expected[kind], kind
        return len(self._answers)


def story(daemon: Daemon, since: int) -> str:
    """For people: who ran what."""
    relays = events(daemon, since, "RequestRelayed")
    layers = [event["payload"]["layers"] for event in relays]
    return f"{len(relays)} relays after layers {sorted(layers)}"


def serve_through_a_pair(daemon: Daemon, expected: Expected, load_ms: int, new: str = NEW) -> None:
    with Clients(daemon) as clients:
        since = go_live(daemon, load_ms, new)
        loaded_to(daemon, 2, new)
        assert daemon.get_status("/ready") == 200
        [pair] = daemon.state()["pairs"]
        assert (pair["new"], pair["old"]) == (new, OLD)
        wait_for("the pair's end", lambda: settled(daemon), 60.0)
    count = clients.check(expected)
    print(f"{count} requests, {story(daemon, since)}")
    relays = [e["payload"]["layers"] for e in events(daemon, since, "RequestRelayed")]
    assert any(0 < layers < LAYERS for layers in relays)
    assert replica(daemon, new)["role"] == "prefill"
    moved = {e["payload"]["rest"] for e in events(daemon, since, "MigrationStarted")}
    assert OLD in moved, "KV of two parts"
    assert daemon.idle()["node"]["kv_mismatches"] == 0
