"""Workers as units of the service manager: one instance of `blitzd-worker@.service` each.

The daemon chooses an instance's options, in a file that the unit reads, and nothing else: what
is run, as whom and with which limits stands in the unit, which is the administrator's. So the
right to start these units is no right to run commands as somebody else, which the right to
make transient units would be.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

START_S = 20.0
"""For a manager that starts many units at once, at boot."""
CAUSE_S = 0.5
"""On a busy machine the answer takes a fifth of it (docs/systemd.md)."""

RESULTS = {
    "oom-kill": "killed by SIGKILL (out of memory, says its unit)",
    "watchdog": "killed by its unit's watchdog",
    "timeout": "did not stop in its unit's time",
}


class UnitFailed(Exception):
    """The manager did not start a unit. The message says why."""


def unit_of(name: str) -> str:
    """`name` is ID-EPOCH."""
    return f"blitzd-worker@{name}.service"


def unit_dir() -> Path:
    """Where units find their options. Raises ValueError outside of blitzd.service."""
    given = os.environ.get("RUNTIME_DIRECTORY")
    if not given:
        raise ValueError(
            "node.spawn: systemd, but $RUNTIME_DIRECTORY is not set; accepted: process, or start "
            "the daemon as blitzd.service"
        )
    return Path(given.split(":")[0])


async def start(name: str, options: Sequence[str]) -> int:
    """The worker's pid. Raises UnitFailed."""
    unit = unit_of(name)
    path = unit_dir() / f"{name}.env"
    path.write_text(f'BLITZD_WORKER_OPTIONS="{shlex.join(options)}"\n')
    await _systemctl("start", unit)
    shown = await show(name, "MainPID")
    pid = int(shown.get("MainPID") or 0)
    if not pid:
        raise UnitFailed(f"{unit} ended at once: {await cause(name)}")
    return pid


async def cause(name: str) -> str:
    """How the process of a unit died, on kernels whose pidfds do not say (before 6.15)."""
    with contextlib.suppress(UnitFailed, TimeoutError):
        async with asyncio.timeout(CAUSE_S):
            while True:
                shown = await show(name, *ENDING, timeout_s=CAUSE_S)
                if shown.get("ActiveState") in ENDED:
                    return _describe(shown)
                await asyncio.sleep(0.005)  # the manager has yet to notice
    return "exited; its unit did not say how in time"


ENDING = ("ActiveState", "Result", "ExecMainCode", "ExecMainStatus")
ENDED = ("inactive", "failed")
KILLED = (str(os.CLD_KILLED), str(os.CLD_DUMPED))


def _describe(shown: dict[str, str]) -> str:
    if shown["Result"] in RESULTS:
        return RESULTS[shown["Result"]]
    status = int(shown["ExecMainStatus"])
    if shown["ExecMainCode"] in KILLED:
        return f"killed by {signal.Signals(status).name}"
    return f"exited with status {status}"


async def forget(name: str) -> None:
    """Lets the manager drop a unit that failed, and its options."""
    (unit_dir() / f"{name}.env").unlink(missing_ok=True)
    with contextlib.suppress(UnitFailed):  # one that ended well is forgotten already
        await _systemctl("reset-failed", unit_of(name))


async def show(name: str, *properties: str, timeout_s: float = START_S) -> dict[str, str]:
    wanted = ",".join(properties)
    text = await _systemctl("show", unit_of(name), "--property", wanted, timeout_s=timeout_s)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


async def _systemctl(*args: str, timeout_s: float = START_S) -> str:
    """What it prints. Raises UnitFailed with what it complains about."""
    argv = ["systemctl", "--no-ask-password", "--no-pager", *args]
    run = partial(subprocess.run, capture_output=True, text=True, timeout=timeout_s, check=False)
    try:
        done = await asyncio.to_thread(run, argv)
    except OSError as error:
        raise UnitFailed(f"systemctl: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise UnitFailed(f"{' '.join(argv)}: no answer within {timeout_s:g} s") from error
    if done.returncode:
        reason = done.stderr.strip()
        raise UnitFailed(reason or f"systemctl {args[0]}: exit code {done.returncode}")
    return str(done.stdout)
