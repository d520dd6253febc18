"""`blitzd config`: what a daemon would be told, before it is."""

import sys
from pathlib import Path
from typing import Any

import cyclopts
import msgspec

from blitzd.cli.options import Assignments, ConfigFile
from blitzd.cli.settings_layers import KEYS, SECTIONS, Loaded, SettingsError, load

app = cyclopts.App(name="config", help="Check settings, and show what they come to.")


@app.command
def check(file: Path, *, json: bool = False) -> int:
    """Say everything that is wrong with a file. Exit code 1 when anything is.

    The environment is left out: that of the daemon is another one.

    Parameters
    ----------
    file
        A TOML file.
    json
        Print one JSON object: ok, keys (how many the file sets), problems.
    """
    problems: tuple[str, ...] = ()
    keys = 0
    try:
        keys = len(load(file, environment={}).origins)
    except SettingsError as error:
        problems = error.problems
    if json:
        print(_json({"ok": not problems, "keys": keys, "problems": problems}))
    elif problems:
        print("\n".join(problems), file=sys.stderr)
    else:
        print(f"{file}: fine; keys set: {keys}")
    return 1 if problems else 0


@app.command
def show(*, config: ConfigFile = None, set: Assignments = (), json: bool = False) -> int:
    """The settings that `blitzd serve` would have with the same options here, as TOML, and
    where each comes from.

    Parameters
    ----------
    config
        A TOML file.
    set
        section.key=value, as for serve.
    json
        Print {section: {key: {value, origin}}}.
    """
    try:
        loaded = load(config, set)
    except SettingsError as error:
        print(f"blitzd config show: {error}", file=sys.stderr)
        return 1
    shown = _shown(loaded)
    print(_json(shown) if json else _toml(shown))
    return 0


def _shown(loaded: Loaded) -> dict[str, dict[str, dict[str, Any]]]:
    shown: dict[str, dict[str, dict[str, Any]]] = {section: {} for section in SECTIONS}
    for section, name in KEYS:
        shown[section][name] = {
            "value": getattr(getattr(loaded.settings, section), name),
            "origin": loaded.origins.get((section, name), "default"),
        }
    return shown


def _toml(shown: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = []
    for section, keys in shown.items():
        lines.append(f"[{section}]")
        for name, what in keys.items():
            value = to_toml(msgspec.to_builtins(what["value"]))
            lines.append(f"{f'{name} = {value}':<40} # {what['origin']}")
        lines.append("")
    return "\n".join(lines[:-1])


def to_toml(value: Any) -> str:
    """On one line."""
    if isinstance(value, dict):
        pairs = [f"{to_toml(key)} = {to_toml(one)}" for key, one in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    # A JSON string is a TOML one, as are JSON's numbers, booleans and lists.
    return msgspec.json.encode(value).decode()


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
