"""`blitzd doctor`: what this machine lacks for what the settings ask, and how to mend it."""

import sys
from typing import Literal

import msgspec
from rich.console import Console

from blitzd.cli.doctor_checks import CHECKS, Finding, Machine
from blitzd.cli.doctor_nodes import nodes
from blitzd.cli.options import Assignments, ConfigFile
from blitzd.cli.settings_layers import SettingsError, load

MARKS: dict[Literal["ok", "warn", "fail"], str] = {
    "ok": "[green]ok  [/]",
    "warn": "[yellow]warn[/]",
    "fail": "[red]FAIL[/]",
}


def doctor(*, config: ConfigFile = None, set: Assignments = (), json: bool = False) -> int:
    """Check that this machine can run what the settings ask for. Starts nothing and changes
    nothing. Exit code 1 when something is in the way.

    Parameters
    ----------
    config
        A TOML file, as for serve.
    set
        section.key=value, as for serve.
    json
        Print one JSON object: ok, and checks with name, status (ok, warn, fail), found, fix.
    """
    try:
        settings = load(config, set).settings
    except SettingsError as error:
        print(f"blitzd doctor: {error}", file=sys.stderr)
        return 2
    machine = Machine.of(settings)
    console = Console(highlight=False, soft_wrap=True)
    findings: list[Finding] = []
    for check in (*CHECKS, nodes):
        for finding in check(machine):
            findings.append(finding)
            if not json:
                _print(console, finding)
    ok = all(finding.status != "fail" for finding in findings)
    if json:
        report = {"ok": ok, "checks": findings}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return 0 if ok else 1


def _print(console: Console, finding: Finding) -> None:
    console.print(f"{MARKS[finding.status]} {finding.name:<13}", end=" ")
    # What was found may have brackets of its own.
    console.print(finding.found, markup=False)
    if finding.fix:
        console.print(f"     {'':<13} {finding.fix}", markup=False, style="bold")
