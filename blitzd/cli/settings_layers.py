"""Where settings come from: defaults, then the file, the environment, the command line, each
over the one before. Every value is checked where it is named, so that an error says where."""

import contextlib
import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import inspect

from blitzd.cli.settings import Settings, conflicts
from blitzd.control.presets import PresetRefused, expand

ENVIRONMENT = "BLITZD_"

Origins = dict[tuple[str, str], str]
"""(section, key): what set it. A key that is not here has its default."""


class SettingsError(ValueError):
    """One line for each thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Key:
    section: str
    name: str
    type: Any
    default: Any

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def accepted(self) -> str:
        return accepted(self.type)

    def check(self, value: Any) -> Any:
        """Raises ValueError."""
        return msgspec.convert(value, self.type)


@dataclass(frozen=True, slots=True)
class Loaded:
    settings: Settings
    origins: Origins


def _keys() -> Iterator[Key]:
    for section in msgspec.structs.fields(Settings):
        for field in msgspec.structs.fields(section.type):
            default = getattr(section.default, field.name)
            yield Key(section.name, field.name, field.type, default)


KEYS = {(key.section, key.name): key for key in _keys()}
SECTIONS = tuple(dict.fromkeys(section for section, _ in KEYS))


def load(
    path: Path | None = None,
    assignments: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    options: Mapping[str, tuple[str, Any]] | None = None,
) -> Loaded:
    """`assignments` are those of `--set`; `options` maps "section.key" to (the option's name,
    its value), last of all. Raises SettingsError."""
    layers = _Layers()
    if path is not None:
        layers.add_file(path)
    layers.add_environment(environment)
    for assignment in assignments:
        layers.add_assignment(assignment)
    for name, (option, value) in (options or {}).items():
        section, _, key = name.partition(".")
        layers.add(section, key, value, option)
    return layers.loaded()


class _Layers:
    def __init__(self) -> None:
        self._values: dict[tuple[str, str], Any] = {}
        self._origins: Origins = {}
        self._problems: list[str] = []

    def add_file(self, path: Path) -> None:
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError([f"{path}: {error.strerror}"]) from error
        except UnicodeDecodeError as error:
            raise SettingsError([f"{path}: not UTF-8: {error}"]) from error
        except tomllib.TOMLDecodeError as error:
            raise SettingsError([f"{path}: not TOML: {error}"]) from error
        for section, values in document.items():
            if not isinstance(values, dict):
                sections = ", ".join(f"[{name}]" for name in SECTIONS)
                self._problems.append(
                    f"{path}: {section} stands outside of a section; accepted: {sections}"
                )
                continue
            if section not in SECTIONS:
                near = _nearest(section, SECTIONS)
                self._problems.append(
                    f"{path}: [{section}]: no such section" + (f"; meant [{near}]?" if near else "")
                )
                continue
            for key, value in values.items():
                self.add(section, key, value, str(path))

    def add_environment(self, environment: Mapping[str, str]) -> None:
        for variable, text in sorted(environment.items()):
            section, separator, key = variable.removeprefix(ENVIRONMENT).partition("__")
            if variable.startswith(ENVIRONMENT) and separator:
                self._add_text(section.lower(), key.lower(), text, f"${variable}")

    def add_assignment(self, assignment: str) -> None:
        name, equals, text = assignment.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot):
            self._problems.append(f"--set {assignment}: accepted: section.key=value")
            return
        self._add_text(section, key, text.strip(), "--set")

    def _add_text(self, section: str, key: str, text: str, origin: str) -> None:
        known = KEYS.get((section, key))
        value: Any = text
        if known is not None and not _is_text(inspect.type_info(known.type)):
            # What is no TOML stays text, and is refused with what would be accepted.
            with contextlib.suppress(tomllib.TOMLDecodeError):
                value = tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
        self.add(section, key, value, origin)

    def add(self, section: str, key: str, value: Any, origin: str) -> None:
        known = KEYS.get((section, key))
        if known is None:
            names = [str(one) for one in KEYS.values()]
            near = _nearest(f"{section}.{key}", names)
            hint = f"; meant {near}?" if near else ""
            self._problems.append(f"{origin}: {section}.{key}: no such key{hint}")
            return
        try:
            self._values[section, key] = known.check(value)
        except ValueError:
            wrong = _wrong(str(known), known.type, value)
            self._problems += [f"{origin}: {problem}" for problem in wrong]
            return
        self._origins[section, key] = origin

    def loaded(self) -> Loaded:
        if self._problems:
            raise SettingsError(self._problems)
        sections = {}
        for field in msgspec.structs.fields(Settings):
            given = {k: v for (section, k), v in self._values.items() if section == field.name}
            if field.name == "policy":
                preset = self._preset()
                for name in preset.keys() - given.keys():
                    self._origins["policy", name] = "baseline.preset"
                given = preset | given
            sections[field.name] = field.type(**given)
        settings = Settings(**sections)
        if found := conflicts(settings):
            raise SettingsError([self._where(problem) for problem in found])
        return Loaded(settings, self._origins)

    def _preset(self) -> dict[str, int]:
        named = ("baseline", "preset")
        preset = self._values.get(named, "")
        try:
            return expand(preset) if preset else {}
        except PresetRefused as error:
            raise SettingsError([f"{self._origins[named]}: baseline.preset: {error}"]) from error

    def _where(self, problem: str) -> str:
        origins = {
            origin
            for (section, key), origin in self._origins.items()
            if f"{section}.{key}" in problem
        }
        return f"{', '.join(sorted(origins)) or 'defaults'}: {problem}"


def _nearest(name: str, names: Sequence[str]) -> str:
    """The known name that was probably meant; a key may have been put into a wrong section."""
    found = difflib.get_close_matches(name, names, 1)
    if not found:
        _, _, key = name.rpartition(".")
        found = [known for known in names if known.rpartition(".")[2] == key]
    return found[0] if found else ""


def table_of(kind: Any) -> tuple[Any, type[msgspec.Struct]] | None:
    """Of a setting that holds tables by name: the type of the name, and of each."""
    inner = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(inner) is not dict:
        return None
    name, table = get_args(inner)
    return name, table


def _wrong(name: str, kind: Any, value: Any) -> list[str]:
    """What of a value is refused, and what would be accepted; of tables by their keys."""
    tables = table_of(kind)
    if tables is None or not isinstance(value, dict):
        return [f"{name}: {value!r}; accepted: {accepted(kind)}"]
    row_name, table = tables
    found = []
    for row, values in value.items():
        if not _fits(row, row_name):
            found.append(f"{name}: {row!r}; accepted: names of {accepted(row_name)}")
        elif isinstance(values, dict):
            found += _wrong_in_table(f"{name}.{row}", table, values)
        else:
            found.append(f"{name}.{row}: {values!r}; accepted: a table")
    return found


def _wrong_in_table(name: str, table: type[msgspec.Struct], values: dict[str, Any]) -> list[str]:
    fields = {field.name: field for field in msgspec.structs.fields(table)}
    found = []
    for key in sorted(values.keys() - fields.keys()):
        near = _nearest(key, list(fields))
        found.append(f"{name}.{key}: no such key" + (f"; meant {near}?" if near else ""))
    for key, field in fields.items():
        if key not in values:
            if field.required:
                found.append(f"{name}.{key}: missing; accepted: {accepted(field.type)}")
        elif not _fits(values[key], field.type):
            found.append(f"{name}.{key}: {values[key]!r}; accepted: {accepted(field.type)}")
    return found


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except ValueError:
        return False
    return True


def accepted(kind: Any) -> str:
    """In words: what a setting of this type takes."""
    return _accepted(inspect.type_info(kind))


def _accepted(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(extra_json_schema={"description": str(words)}):
            return words
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return ", ".join(map(str, values))
        case inspect.IntType(ge=low, le=high):
            return f"an integer from {low} to {high}"
        case inspect.FloatType(gt=None, ge=low, le=high):
            return f"a number from {low:g} to {high:g}"
        case inspect.FloatType(gt=low, le=high):
            return f"a number above {low:g}, up to {high:g}"
        case inspect.StrType(min_length=None):
            return "a string"
        case inspect.StrType():
            return "a string that is not empty"
        case inspect.VarTupleType(min_length=least, max_length=most):
            return f"a list of {least} to {most} strings"
    raise TypeError(f"settings of {kind} have no words")


def _is_text(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.Metadata):
        kind = kind.type
    return isinstance(kind, inspect.StrType | inspect.LiteralType)
