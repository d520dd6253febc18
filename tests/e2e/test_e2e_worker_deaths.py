"""Workers that die or stop under load end no stream, and change none."""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.e2e.daemon import Daemon, wait_for
from tests.e2e.streams import Streams, body_of

HANG_S = 2.0


@pytest.fixture
def four(state_dir: Path) -> Iterator[Daemon]:
    roles = ("--prefill", "2", "--decode", "2", "--spare", "0")
    running = Daemon(state_dir, *roles, "--set", f"limits.hang_deadline_s={HANG_S}")
    try:
        running.start().ready()
        wait_for("all to serve", lambda: len(serving(running)) == 4, 90)
        yield running
    finally:
        running.end()


def serving(daemon: Daemon) -> list[dict[str, Any]]:
    replicas = daemon.state()["replicas"]
    return [r for r in replicas if r["state"] in ("Prefill", "Decode")]


def hurt(daemon: Daemon, how: signal.Signals, times: int, every_s: float, seed: int) -> None:
    """A random one of the workers, whatever it does."""
    random = Random(seed)
    for _ in range(times):
        began = time.monotonic()
        alive = [r for r in daemon.state()["replicas"] if r["pid"]]
        if alive:
            os.kill(random.choice(alive)["pid"], how)
        time.sleep(max(0.0, every_s - (time.monotonic() - began)))


def resumes(daemon: Daemon) -> Counter[str]:
    events = daemon.events()
    found = Counter(e["payload"]["cause"] for e in events if e["type"] == "RequestResumed")
    assert {cause: n for cause, n in daemon.state()["resumes"].items() if n} == found
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_no_stream_ends_or_changes_when_workers_do(four: Daemon, how: signal.Signals) -> None:
    """Greedy and sampled alike, by the digests of their tokens. A stopped worker is known by its
    silence."""
    with Streams(four, clients=8, tokens=40) as streams:
        hurt(four, how, times=3, every_s=2.0, seed=int(how))
        wait_for("the last one's successor", lambda: len(serving(four)) == 4, 90)
    streams.check()
    lost = [e["payload"]["reason"] for e in four.events() if e["type"] == "WorkerLost"]
    print(f"{len(streams.done)} streams; lost: {lost}; resumes: {dict(resumes(four))}")
    assert lost
    assert sum(resumes(four).values()) > 0, "nobody was there to be resumed"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_nor_does_one_when_a_worker_dies_every_three_seconds(
    four: Daemon, how: signal.Signals
) -> None:
    with Streams(four, clients=8, tokens=100) as streams:
        hurt(four, how, times=20, every_s=3.0, seed=7)
        wait_for("the last one's successor", lambda: len(serving(four)) == 4, 120)
    streams.check()
    lost = [e for e in four.events() if e["type"] == "WorkerLost"]
    print(f"{len(streams.done)} streams; {len(lost)} lost; resumes: {dict(resumes(four))}")
    assert sum(resumes(four).values()) > 0


def test_a_worker_that_was_stopped_for_less_than_the_deadline_goes_on(four: Daemon) -> None:
    body = body_of(1, 60)
    undisturbed = four.complete(**body)["choices"][0]["text"]
    text = ""
    for count, event in enumerate(four.stream("/v1/completions", body)):
        text += event["choices"][0]["text"]
        if count == 5:
            [decoding] = [r for r in serving(four) if r["inflight"]]
            os.kill(decoding["pid"], signal.SIGSTOP)
            time.sleep(HANG_S / 4)
            os.kill(decoding["pid"], signal.SIGCONT)
    assert text == undisturbed
    assert not resumes(four)
