"""The unit files and the example, without a manager."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from blitzd.cli.settings import Settings
from blitzd.cli.settings_layers import KEYS, load
from tests.systemd.manager import UNITS

SERVICES = ("blitzd.service", "blitzd-worker@.service")
EXAMPLE = UNITS / "blitzd.toml"

analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with a program that is there."""
    program = Path(sys.executable).parent / "blitzd"
    for unit in SERVICES:
        text = (UNITS / unit).read_text()
        assert text.count("/opt/blitzd/bin/blitzd") == 1
        (tmp_path / unit).write_text(text.replace("/opt/blitzd/bin/blitzd", str(program)))
    return tmp_path


@analyze
@pytest.mark.parametrize("unit", SERVICES)
def test_systemd_has_nothing_to_say_about_a_unit(installed: Path, unit: str) -> None:
    argv = ["systemd-analyze", "verify", "--man=no", str(installed / unit)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@analyze
@pytest.mark.parametrize(("unit", "most"), [(SERVICES[0], 16), (SERVICES[1], 19)])
def test_exposure_stays_what_the_page_says(unit: str, most: int) -> None:
    argv = ["systemd-analyze", "security", "--offline=yes", f"--threshold={most}"]
    argv += ["--no-pager", str(UNITS / unit)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None
    page = (UNITS.parent / "docs" / "systemd.md").read_text()
    assert re.search(rf"`{re.escape(unit)}`[^\n]*\b{re.escape(found[1])}\b", page), found[1]


def setting(unit: str, name: str) -> str:
    found = re.findall(rf"^{name}=(.*)$", (UNITS / unit).read_text(), re.MULTILINE)
    assert len(found) == 1, (unit, name)
    return str(found[0])


def test_times_of_the_unit_fit_the_defaults_of_the_daemon() -> None:
    limits = Settings().limits
    service = "blitzd.service"
    assert int(setting(service, "TimeoutStopSec")) > limits.drain_s + 20
    down_s = int(setting(service, "RestartSec")) + int(setting(service, "TimeoutAbortSec"))
    assert down_s < limits.orphan_timeout_s / 2, "workers wait for the next daemon"
    assert int(setting(service, "WatchdogSec")) >= 10 * 2, "ten times what counts as a stall"
    assert setting(service, "KillMode") == "process"


def test_the_example_sets_what_it_says_and_shows_every_other_key_with_its_default(
    tmp_path: Path,
) -> None:
    assert load(EXAMPLE, (), {}).origins == {("node", "spawn"): str(EXAMPLE)}
    whole = tmp_path / "whole.toml"
    whole.write_text(re.sub(r"^#(\w+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE))
    loaded = load(whole, (), {})
    # Of the policy's many numbers it shows how one is set.
    shown = {key for key in loaded.origins if key[0] != "policy"}
    assert shown == {key for key in KEYS if key[0] != "policy"}
    node = msgspec.structs.replace(loaded.settings.node, spawn="process")
    assert msgspec.structs.replace(loaded.settings, node=node) == Settings()
