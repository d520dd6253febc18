"""What an operator may ask of a node, and the core's input for each.

Times come as seconds from now and become the core's clock here, so that the input has all
that the decision needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blitzd.control.moves import ROLES
from blitzd.events import types as ev
from blitzd.events.record import Payload

__all__ = [
    "MAX_DEADLINE_S",
    "ROLES",
    "ChangePolicy",
    "Deactivate",
    "Drain",
    "GoLive",
    "Mutate",
    "OperatorCommand",
    "Release",
    "Remove",
    "Restart",
    "Scale",
    "StopRestarts",
    "Undrain",
    "input_of",
]

MAX_DEADLINE_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs there, take nothing new. Without a deadline: the policy's."""

    replica: str
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Undrain:
    """Serve again; a restart that has not ended the worker yet is called off."""

    replica: str


@dataclass(frozen=True, slots=True)
class Restart:
    """A new worker for this replica, or for each in turn (empty)."""

    replica: str = ""
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class StopRestarts:
    """Of a restart of all: no other begins."""


@dataclass(frozen=True, slots=True)
class Mutate:
    replica: str
    role: str


@dataclass(frozen=True, slots=True)
class Deactivate:
    """Give up the weights of an empty one."""

    replica: str


@dataclass(frozen=True, slots=True)
class GoLive:
    """Serve as a prefill while the weights arrive; `old` finishes what this one has begun."""

    replica: str
    old: str


@dataclass(frozen=True, slots=True)
class Scale:
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Remove:
    """One less of its role, and this one it is."""

    replica: str


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    values: tuple[tuple[str, int], ...]
    preset: str = ""
    """Of docs/baselines.md; `values` go over it."""


@dataclass(frozen=True, slots=True)
class Release:
    """The counts are the planner's again."""


OperatorCommand = (
    Drain
    | Undrain
    | Restart
    | StopRestarts
    | Mutate
    | Deactivate
    | GoLive
    | Scale
    | Remove
    | ChangePolicy
    | Release
)


def input_of(command: OperatorCommand, now_ns: int) -> Payload:
    """`now_ns` is the core's clock."""
    return _INPUTS[type(command)](command, now_ns)


def _drain(command: Drain, now_ns: int) -> Payload:
    if command.deadline_s is None:
        return ev.DrainRequested(command.replica, 0)
    return ev.DrainRequested(command.replica, now_ns + int(command.deadline_s * 1e9))


def _restart(command: Restart, now_ns: int) -> Payload:
    # "At once" is a time too; 0 is the policy's.
    drain_ms = 0 if command.deadline_s is None else max(1, round(command.deadline_s * 1000))
    if command.replica:
        return ev.RestartRequested(command.replica, drain_ms)
    return ev.RollingRestartRequested(drain_ms)


_INPUTS: dict[type, Callable[[Any, int], Payload]] = {
    Drain: _drain,
    Undrain: lambda command, _: ev.UndrainRequested(command.replica),
    Restart: _restart,
    StopRestarts: lambda command, _: ev.RollingRestartStopRequested(),
    Mutate: lambda command, _: ev.RoleRequested(command.replica, command.role),
    Deactivate: lambda command, _: ev.DeactivateRequested(command.replica),
    GoLive: lambda command, _: ev.LivePairRequested(command.replica, command.old),
    Scale: lambda command, _: ev.ScaleRequested(command.prefill, command.decode),
    Remove: lambda command, _: ev.RemoveRequested(command.replica),
    ChangePolicy: lambda command, _: ev.PolicyRequested(command.values, command.preset),
    Release: lambda command, _: ev.ReleaseRequested(),
}
