"""Real workers that stall, in each way that one can, and those that only look like it."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from blitzd.events import types as ev
from tests.node.pools import Pool, pool

DEADLINE_S = 2.0
# Other tenants of the machine hold the tests up, too.
SLACK_S = 1.0

BLOCK_ON_SIGUSR1 = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(120))
"""
"""Python runs handlers in the main thread, which is that of the worker's event loop."""


async def killed_after(running: Pool, at: float) -> tuple[float, str]:
    lost = await running.kept.first(ev.WorkerExited, 60.0)
    return time.monotonic() - at, lost.reason


async def stopped(tmp_path: Path, busy: bool) -> None:
    async with pool(tmp_path, hang_deadline_s=DEADLINE_S, pace_layer_ms=5.0) as running:
        if busy:
            running.generate(1000)
            await running.kept.until(lambda: len(running.kept.tokens) > 3)
        at = time.monotonic()
        os.kill(running.pid, signal.SIGSTOP)
        took, reason = await killed_after(running, at)
        print(f"known after {took:.2f} s: {reason}")
        assert "SIGKILL" in reason and f"silent for {DEADLINE_S:g} s" in reason
        assert took < DEADLINE_S + SLACK_S


@pytest.mark.parametrize("busy", [False, True])
def test_a_stopped_worker_is_killed_within_the_deadline(tmp_path: Path, busy: bool) -> None:
    asyncio.run(stopped(tmp_path, busy))


def test_an_event_loop_that_is_stuck_is_a_hang_though_the_worker_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCK_ON_SIGUSR1)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)

    async def stuck() -> None:
        async with pool(tmp_path, hang_deadline_s=DEADLINE_S, pace_layer_ms=5.0) as running:
            running.generate(1000)
            await running.kept.until(lambda: len(running.kept.tokens) > 3)
            at = time.monotonic()
            os.kill(running.pid, signal.SIGUSR1)
            took, reason = await killed_after(running, at)
            assert f"silent for {DEADLINE_S:g} s" in reason
            assert took < DEADLINE_S + SLACK_S

    asyncio.run(stuck())


def test_steps_longer_than_the_hang_deadline_are_none(tmp_path: Path) -> None:
    async def slow() -> None:
        # 4 layers: 4 s for the step, twice the deadline.
        async with pool(tmp_path, hang_deadline_s=DEADLINE_S, pace_layer_ms=1000.0) as running:
            running.generate(1)
            await running.kept.until(lambda: len(running.kept.tokens) == 1)
            assert not [p for p in running.kept.posted if isinstance(p, ev.WorkerExited)]

    asyncio.run(slow())


def test_a_step_that_does_not_end_has_its_own_deadline(tmp_path: Path) -> None:
    async def endless() -> None:
        async with pool(tmp_path, step_deadline_s=1.5, pace_layer_ms=60_000.0) as running:
            running.generate(3)
            reason = (await killed_after(running, time.monotonic()))[1]
            assert "computing step 1 for" in reason

    asyncio.run(endless())


def test_a_daemon_that_was_held_up_itself_blames_nobody(tmp_path: Path) -> None:
    async def held_up() -> None:
        async with pool(tmp_path, hang_deadline_s=DEADLINE_S) as running:
            for _ in range(2):
                time.sleep(1.25 * DEADLINE_S)  # noqa: ASYNC251 - it stands for a machine that was suspended
                await asyncio.sleep(0.3)
            assert not [p for p in running.kept.posted if isinstance(p, ev.WorkerExited)]
            os.kill(running.pid, signal.SIGSTOP)
            assert "silent" in (await killed_after(running, time.monotonic()))[1]

    asyncio.run(held_up())
