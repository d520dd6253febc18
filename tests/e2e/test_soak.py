"""A steady rate of requests of which every third or so is given up by its client: nothing
fails, and afterwards nothing is left, nor has anything grown.

BLITZD_SOAK_S makes it longer or shorter than its marks say.
"""

import contextlib
import http.client
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.daemon import Daemon, worker_pids

CLIENTS = 4
DISCONNECTS = 0.3
PROMPTS = ("Hello", "The capital of France is", "Once upon a time " * 12, "word " * 150)
GROWTH = 1.1
GROWTH_BYTES = 16 << 20
FDS_MORE = 4
"""Sockets to peers and clients come and go a little later than requests."""


class Load:
    """Clients that read their streams to the end, or leave somewhere on the way."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon = daemon
        self._seed = seed
        self._until = 0.0
        self.finished = 0
        self.left = 0
        self.troubles: list[str] = []
        self._lock = threading.Lock()

    def run(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        clients = [threading.Thread(target=self._client, args=(n,)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(seconds + 120)
            assert not client.is_alive(), "a stream has not ended"

    def _client(self, number: int) -> None:
        random = Random(self._seed * 1000 + number)
        while time.monotonic() < self._until:
            leaves_after = random.randint(0, 12) if random.random() < DISCONNECTS else None
            try:
                self._ask(random, leaves_after)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                with self._lock:
                    self.troubles.append(repr(error))
            time.sleep(random.expovariate(4.0))

    def _ask(self, random: Random, leaves_after: int | None) -> None:
        wanted = random.randint(1, 40)
        body = {
            "prompt": random.choice(PROMPTS) + str(random.random()),
            "max_tokens": wanted,
            "temperature": random.choice([0, 0.8]),
            "ignore_eos": True,
        }
        seen = 0
        finish = None
        with contextlib.closing(self._daemon.stream("/v1/completions", body)) as events:
            for event in events:
                assert "error" not in event, event
                if leaves_after is not None and seen >= leaves_after:
                    break
                for choice in event["choices"]:
                    seen += 1
                    finish = choice["finish_reason"] or finish
        with self._lock:
            if finish is None:
                assert leaves_after is not None, f"{seen} events and no end"
                self.left += 1
            else:
                assert finish == "length"
                self.finished += 1


def footprint(daemon: Daemon) -> dict[str, tuple[int, int]]:
    """(resident bytes, descriptors) of the daemon and each of its workers, by role."""
    assert daemon.process is not None
    pids = {"daemon": daemon.process.pid}
    pids |= {r["id"]: r["pid"] for r in daemon.state()["replicas"] if r["pid"]}
    assert len(pids) == len(worker_pids(daemon.state_dir)) + 1
    found = {}
    for name, pid in pids.items():
        # Pages of shared arenas count in several processes, and depend on what was mapped.
        status = Path(f"/proc/{pid}/status").read_text()
        private = int(status.split("RssAnon:")[1].split()[0]) << 10
        found[name] = (private, len(list(Path(f"/proc/{pid}/fd").iterdir())))
    return found


def gauges(daemon: Daemon) -> dict[str, float]:
    """Those of `/metrics` that must be zero when nothing runs."""
    with urllib.request.urlopen(f"{daemon.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    zeros = re.compile(
        r"^(blitzd_(?:requests_open|queue_(?:requests|tokens)|links\w*|link_faults|replica_inflight_requests"
        r"|replica_kv_blocks_used|link_failures_total|kv_mismatches_total|audit_failures_total"
        r"|invariants_broken_total)(?:\{.*\})?) (\S+)$",
        re.MULTILINE,
    )
    return {name: float(value) for name, value in zeros.findall(text)}


@pytest.fixture
def served(tmp_path: Path, same_node: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    # Every transfer is verified, and one that stays behind is found within seconds.
    monkeypatch.setenv("BLITZD_VERIFY_KV", "1")
    running = Daemon(tmp_path / "state", "--spare", "0", "--same-node", same_node).start()
    try:
        running.ready()
        yield running
    finally:
        running.end()


def types_of(events: list[dict[str, Any]]) -> set[str]:
    return {event["type"] for event in events}


@pytest.mark.parametrize("same_node", ["map", pytest.param("ucx", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(8.0, id="short"),
        pytest.param(600.0, id="ten-minutes", marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
    ],
)
def test_nothing_fails_and_nothing_is_left(served: Daemon, seconds: float) -> None:
    """B.2 #27."""
    seconds = float(os.environ.get("BLITZD_SOAK_S", seconds))
    warm = Load(served, seed=1)
    warm.run(seconds / 4)
    served.idle()
    before = footprint(served)
    load = Load(served, seed=2)
    load.run(seconds)
    shown = served.idle()
    time.sleep(3.0)  # an audit and its grace
    after = footprint(served)
    print(f"{load.finished} finished, {load.left} left, {before} -> {after}")
    assert warm.troubles + load.troubles == []
    assert load.finished > seconds / 8
    assert load.left > load.finished / 10
    assert shown["requests"]["failed"] == shown["requests"]["rejected"] == 0
    happened = types_of(served.events())
    assert not happened & {"MigrationFailed", "AuditFailed", "WorkerLost", "RequestResumed"}
    found = gauges(served)
    assert len(found) > 10
    assert {name: value for name, value in found.items() if value} == {}
    for name, (resident, descriptors) in after.items():
        assert descriptors <= before[name][1] + FDS_MORE, name
        assert resident <= before[name][0] * GROWTH + GROWTH_BYTES, name
