"""Renders a model's chat template: code from a stranger's file, so it is fenced in.

Jinja's immutable sandbox keeps it from reaching Python; a budget of loop turns and calls,
and a ceiling on every string it makes, keep it from running or growing for ever.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE = 1 << 18
MAX_STEPS = 200_000
"""Loop turns and calls of one rendering."""
MAX_TEXT = 1 << 23
"""Characters of any string that a template makes."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


class _Refused(Exception):
    """The template called raise_exception."""


class _Exhausted(Exception):
    pass


class _Budget:
    def __init__(self) -> None:
        self.steps = MAX_STEPS

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _Exhausted(f"it takes more than {MAX_STEPS} steps")


_budget: ContextVar[_Budget] = ContextVar("_budget")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.spend()
        yield item


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise _Exhausted(f"it makes a text of more than {MAX_TEXT} characters")
    return value


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every way to loop or to grow counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.get().spend()
        if operator in ("*", "**"):
            sizes = [len(v) for v in (left, right) if isinstance(v, str | list | tuple)]
            factor = right if isinstance(right, int) else left
            if not isinstance(factor, int | float) or (sizes and sizes[0] * factor > MAX_TEXT):
                raise _Exhausted("it multiplies a text beyond bounds")
            if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
                raise _Exhausted("it raises a number beyond bounds")
        if operator == "%" and isinstance(left, str):
            raise _Exhausted("it formats with %, which is not allowed")
        return _short(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _GROWING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and getattr(function, "__name__", "") == "replace":
            _bound_replace(owner, *args)
        return _short(super().call(context, function, *args, **kwargs))


_GROWING_METHODS = frozenset(
    {"format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "translate"}
)

_FILTERS = (
    "abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
    "first", "float", "groupby", "indent", "int", "items", "join", "last", "length", "list",
    "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe",
    "select", "selectattr", "sort", "string", "sum", "title", "tojson", "trim", "unique", "upper",
)  # fmt: skip


def _bound_replace(text: str, old: str = "", new: str = "", *_: Any) -> None:
    if isinstance(new, str) and (text.count(old) + 1) * len(new) + len(text) > MAX_TEXT:
        raise _Exhausted(f"it makes a text of more than {MAX_TEXT} characters")


def _bounded_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        return _short(function(*args, **kwargs))

    return bounded


def _replace(text: Any, old: str, new: str) -> str:
    _bound_replace(str(text), old, new)
    return str(text).replace(old, new)


def _join(items: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    parts: list[str] = []
    size = 0
    for item in _counted(items):
        part = str(item[attribute] if attribute else item)
        size += len(part) + len(separator)
        if size > MAX_TEXT:
            raise _Exhausted(f"it makes a text of more than {MAX_TEXT} characters")
        parts.append(part)
    return separator.join(parts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    pad = width if isinstance(width, str) else " " * min(int(width), 256)
    if len(pad) * (text.count("\n") + 1) > MAX_TEXT:
        raise _Exhausted(f"it makes a text of more than {MAX_TEXT} characters")
    head, *rest = text.split("\n")
    lines = [pad + line if line or blank else line for line in rest]
    return "\n".join([pad + head if first else head, *lines])


def _tojson(value: Any, indent: int | None = None) -> str:
    """As Hugging Face's: not escaped for HTML, non-ASCII kept."""
    return json.dumps(value, ensure_ascii=False, indent=min(indent, 16) if indent else None)


def _concat(*values: Any) -> str:
    _budget.get().spend()
    return str(_short("".join(map(str, values))))


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern[:256])


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    own = {"replace": _replace, "join": _join, "indent": _indent, "tojson": _tojson}
    environment.filters = {
        name: _bounded_filter(own.get(name, environment.filters[name])) for name in _FILTERS
    }
    environment.filters["_counted"] = _counted
    environment.filters["_concat"] = _concat
    del environment.globals["lipsum"], environment.globals["cycler"], environment.globals["joiner"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template. Raises ValueError when it is not one."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > MAX_TEMPLATE:
            raise ValueError(f"the chat template has {len(source)} characters; {MAX_TEMPLATE} may")
        environment = _environment()
        try:
            tree = environment.parse(source)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
            _bound_concats(tree)
            code = environment.compile(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template cannot be compiled: {error}") from error
        self._template = jinja2.Template.from_code(environment, code, environment.globals)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt, generation prompt included. Raises ValueError, see `Tokenizer`."""
        for index, message in enumerate(messages):
            _check_message(index, message)
        token = _budget.set(_Budget())
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=True, **self._tokens
            ):
                size += len(piece)
                if size > MAX_TEXT:
                    raise _Exhausted(f"it makes more than {MAX_TEXT} characters")
                pieces.append(piece)
        except _Refused as error:
            raise ValueError(f"the chat template refuses messages: {error}") from None
        except (_Exhausted, jinja2.TemplateError, RecursionError, MemoryError) as error:
            raise ValueError(f"the chat template failed: {error}") from error
        except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
            raise ValueError(f"the chat template failed on messages: {error}") from error
        finally:
            _budget.reset(token)
        return "".join(pieces)


def _check_message(index: int, message: dict[str, Any]) -> None:
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(
            f"messages[{index}].role is {role!r}; one of {', '.join(_ROLES)} is accepted"
        )


def _bound_concats(tree: nodes.Node) -> None:
    """Replaces `a ~ b`, which the sandbox does not intercept, by a bounded filter."""
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for name, value in list(parent.iter_fields()):
            if isinstance(value, nodes.Concat):
                setattr(parent, name, _as_filter(value))
            elif isinstance(value, list):
                value[:] = [_as_filter(v) if isinstance(v, nodes.Concat) else v for v in value]


def _as_filter(concat: nodes.Concat) -> nodes.Filter:
    first, *rest = concat.nodes
    return nodes.Filter(first, "_concat", rest, [], None, None)
