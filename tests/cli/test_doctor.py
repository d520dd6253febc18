"""What the doctor finds on machines that lack something, and that it leaves no trace."""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blitzd.cli import doctor_checks
from blitzd.cli.doctor_checks import Finding, Machine
from blitzd.cli.settings_layers import load
from tests.e2e.daemon import free_port

LOG = Path(__file__).parent.parent / "data" / "logs" / "v3-pairs" / "log"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return of(tmp_path)


def of(directory: Path, *assignments: str) -> Machine:
    free = (f"http.port={free_port()}", f"admin.port={free_port()}")
    given = (f"node.state_dir={directory / 'state'}", *free, *assignments)
    return Machine.of(load(None, given, {}).settings)


def by_name(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_port_that_is_taken_is_in_the_way_unless_our_daemon_has_it(machine: Machine) -> None:
    assert {f.status for f in doctor_checks.ports(machine)} == {"ok"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", machine.settings.http.port))
        taken.listen()
        found = by_name(doctor_checks.ports(machine))
        assert (found["http.port"].status, found["admin.port"].status) == ("fail", "ok")
        assert str(machine.settings.http.port) in found["http.port"].found
        lock = machine.state_dir / "log" / "lock"
        lock.parent.mkdir(parents=True)
        lock.write_text("4711")
        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            found = by_name(doctor_checks.ports(machine))
        assert found["http.port"].status == "warn"
        assert "process 4711" in found["http.port"].found


def test_a_damaged_log_is_in_the_way_and_the_command_that_shows_more_is_named(
    machine: Machine,
) -> None:
    assert by_name(doctor_checks.state(machine))["log"].found == "none yet"
    log = machine.state_dir / "log"
    shutil.copytree(LOG, log)
    assert by_name(doctor_checks.state(machine))["log"].status == "ok"
    first = min(log.glob("*.log"))
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    found = by_name(doctor_checks.state(machine))["log"]
    assert (found.status, found.fix) == ("fail", f"blitzd log verify {machine.state_dir}")


def test_a_place_that_cannot_be_written_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, int]] = []

    def denied(path: Path, mode: int) -> bool:
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", denied)  # root may write anywhere
    found = by_name(doctor_checks.state(machine))["state_dir"]
    assert found.status == "fail"
    assert str(machine.state_dir.parent) in found.found
    assert asked == [(machine.state_dir.parent, os.W_OK | os.X_OK)]


def test_more_kv_than_memory_is_in_the_way(tmp_path: Path) -> None:
    [found] = doctor_checks.memory(of(tmp_path, "engine.kv_mib=1073741824"))
    assert (found.status, "engine.kv_mib" in found.fix) == ("fail", True)


def test_a_path_too_long_for_sockets_is_in_the_way(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    [found] = doctor_checks.runtime(machine)
    assert (found.status, str(long) in found.found) == ("fail", True)
    assert not list(long.iterdir())


def test_a_model_that_is_nowhere_is_in_the_way(tmp_path: Path) -> None:
    found = by_name(doctor_checks.model(of(tmp_path, "model.name=/no/such.gguf")))
    assert (found["model"].status, "/no/such.gguf" in found["model"].found) == ("fail", True)


def test_units_on_a_machine_without_systemd_are_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/run/systemd/system").is_dir():
        monkeypatch.setenv("PATH", "/nowhere")
    [found] = doctor_checks.manager(of(tmp_path, "node.spawn=systemd"))
    assert found.status == "fail"
    [found] = doctor_checks.manager(of(tmp_path))
    assert found.status != "fail"


def blitzd(*argv: str, shell: str = "") -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "blitzd", "doctor", "--json", *argv]
    if shell:
        command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


def test_a_machine_that_can_is_told_so_and_nothing_is_left_behind(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    arguments = []
    for one in (f"node.state_dir={state_dir}", "http.port=0", "admin.port=0"):
        arguments += ["--set", one]
    code, report = blitzd(*arguments, shell="ulimit -S -n 256")
    checks = {check["name"]: check for check in report["checks"]}
    assert (code, report["ok"]) == (0, True), report
    assert checks["files"]["status"] == "warn"
    assert "256" in checks["files"]["found"]
    assert {"kernel", "memfd", "torch", "ucx", "devices", "systemd"} <= set(checks)
    assert not state_dir.exists()


def test_wrong_settings_are_a_matter_of_usage() -> None:
    argv = [sys.executable, "-m", "blitzd", "doctor", "--set", "http.prot=1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "meant http.port?" in done.stderr) == (2, True)
