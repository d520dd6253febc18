"""What the service manager's answers become. tests/systemd/ has the manager itself."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from blitzd.node import pidfd, worker_units
from blitzd.node.worker_units import UnitFailed


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name, to be filled in by the test; it keeps its arguments."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    return program


def script(program: Path, text: str) -> None:
    program.write_text(f'#!/bin/sh\necho "$@" >> {program}.calls\n{text}\n')
    program.chmod(0o755)


def properties(**values: object) -> str:
    return "\n".join(f"echo {name}={value}" for name, value in values.items())


@pytest.mark.parametrize(
    ("result", "code", "status", "how"),
    [
        ("signal", os.CLD_KILLED, 9, "killed by SIGKILL"),
        ("core-dump", os.CLD_DUMPED, 6, "killed by SIGABRT"),
        ("exit-code", os.CLD_EXITED, 3, "exited with status 3"),
        ("success", os.CLD_EXITED, 0, "exited with status 0"),
        ("oom-kill", os.CLD_KILLED, 9, "killed by SIGKILL (out of memory, says its unit)"),
    ],
)
def test_how_a_unit_died(systemctl: Path, result: str, code: int, status: int, how: str) -> None:
    shown = {"Result": result, "ExecMainCode": code, "ExecMainStatus": status}
    script(systemctl, properties(ActiveState="failed", **shown))
    assert asyncio.run(worker_units.cause("r0-1")) == how


def test_a_manager_that_has_not_noticed_yet_is_asked_again(systemctl: Path) -> None:
    shown = properties(Result="signal", ExecMainCode=2, ExecMainStatus=9)
    seen = f"if [ $(wc -l < {systemctl}.calls) -gt 3 ]; then echo ActiveState=failed;"
    script(systemctl, f"{shown}\n{seen} else echo ActiveState=active; fi")
    assert asyncio.run(worker_units.cause("r0-1")) == "killed by SIGKILL"


def test_a_manager_that_does_not_answer_delays_no_death_for_long(systemctl: Path) -> None:
    script(systemctl, "exec sleep 30")
    began = time.monotonic()
    assert "did not say" in asyncio.run(worker_units.cause("r0-1"))
    assert time.monotonic() - began < worker_units.CAUSE_S + 1.0


def test_a_start_writes_the_options_and_gives_the_pid(systemctl: Path, tmp_path: Path) -> None:
    script(systemctl, 'case "$*" in *show*) echo MainPID=4711 ;; esac')
    options = ["--id", "r0", "--socket", "/run/a b.sock"]
    assert asyncio.run(worker_units.start("r0-1", options)) == 4711
    written = (tmp_path / "r0-1.env").read_text()
    assert written == "BLITZD_WORKER_OPTIONS=\"--id r0 --socket '/run/a b.sock'\"\n"
    calls = Path(f"{systemctl}.calls").read_text().splitlines()
    assert calls[0].endswith("start blitzd-worker@r0-1.service")
    asyncio.run(worker_units.forget("r0-1"))
    assert not (tmp_path / "r0-1.env").exists()


def test_a_start_that_is_refused_says_what_the_manager_said(systemctl: Path) -> None:
    script(systemctl, "echo Access denied >&2; exit 4")
    with pytest.raises(UnitFailed, match="Access denied"):
        asyncio.run(worker_units.start("r0-1", []))


def test_outside_of_the_service_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    with pytest.raises(ValueError, match=r"node\.spawn: systemd, but \$RUNTIME_DIRECTORY"):
        worker_units.unit_dir()


@pytest.mark.parametrize(("end", "code"), [("kill -9 $$", -signal.SIGKILL), ("exit 3", 3)])
def test_the_kernel_says_how_one_that_is_no_child_ended(end: str, code: int) -> None:
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (6, 15):
        pytest.skip("pidfds tell exit codes since Linux 6.15")
    # The grandchild ends once its parent, which reaps it, has said who it is.
    shell = f"(exec sh -c 'sleep 0.3; {end}') & echo $!; wait"
    with subprocess.Popen(["sh", "-c", shell], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        fd = os.pidfd_open(int(parent.stdout.readline()))
        assert asyncio.run(pidfd.exit_code(fd)) is None, "it runs"
        parent.wait(10)
        assert asyncio.run(pidfd.exit_code(fd)) == code
        os.close(fd)
