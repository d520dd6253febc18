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
"""Characters of any string that a template makes, and of all its output."""
MAX_ITEMS = 1 << 20
"""Values in any collection that a template makes."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


class _Refused(Exception):
    """The template called raise_exception."""


class _Exhausted(Exception):
    pass


class _Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.characters = MAX_TEXT
        self._sizes: dict[int, tuple[int, Any]] = {}

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _Exhausted(f"it takes more than {MAX_STEPS} steps")

    def emit(self, length: int) -> None:
        self.characters -= length
        if self.characters < 0:
            raise _Exhausted(f"it makes more than {MAX_TEXT} characters")

    def size(self, value: Any) -> int:
        """Values in a tree of containers. Shared branches count each time, since whoever
        prints or compares them walks them each time."""
        if isinstance(value, dict):
            members: Iterable[Any] = value.values()
        elif isinstance(value, list | tuple | set):
            members = value
        else:
            return 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known[0]
        total = 1 + sum(map(self.size, members))
        if total > MAX_ITEMS:
            raise _Exhausted(f"it makes a collection of more than {MAX_ITEMS} values")
        self._sizes[id(value)] = (total, value)  # kept, so that the id is not used again
        return total


_budget: ContextVar[_Budget] = ContextVar("_budget")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.spend()
        yield item


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise _Exhausted(f"it makes a text of more than {MAX_TEXT} characters")
    elif isinstance(value, list | tuple | dict | set):
        _budget.get().size(value)
    return value


def _emitted(value: Any) -> str:
    text = str(value)
    _budget.get().emit(len(text))
    return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every way to loop or to grow counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.get().spend()
        if operator in ("*", "**"):
            _bound_product(operator, left, right)
        if operator == "%" and isinstance(left, str):
            raise _Exhausted("it formats with %, which is not allowed")
        return _bounded(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _GROWING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        """Keeps the sandbox from making str.format safe: a width is not."""
        return None

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _bound_method(owner, getattr(function, "__name__", ""), *args)
        return _bounded(super().call(context, function, *args, **kwargs))


_GROWING_METHODS = frozenset(
    {"format", "format_map", "center", "ljust", "rjust", "zfill", "expandtabs", "translate"}
)

_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
    "first", "float", "groupby", "indent", "int", "items", "join", "last", "length", "list",
    "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe",
    "select", "selectattr", "sort", "string", "sum", "title", "tojson", "trim", "unique", "upper",
)  # fmt: skip


def _bound_product(operator: str, left: Any, right: Any) -> None:
    texts = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    if texts:
        factor = right if isinstance(right, int) else left
        if not isinstance(factor, int) or texts[0] * factor > MAX_TEXT:
            raise _Exhausted("it multiplies a text beyond bounds")
    elif operator == "**":
        if not (abs(left) <= 1 << 32 and abs(right) <= 64):
            raise _Exhausted("it raises a number beyond bounds")
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if bits > 4096:
            raise _Exhausted(f"it makes a number of {bits} bits")


def _bound_method(text: str, name: str, *args: Any) -> None:
    if name == "replace":
        _bound_replace(text, *args)
    elif name == "join" and args and isinstance(args[0], list | tuple | dict | str):
        parts = sum(len(part) for part in args[0] if isinstance(part, str))
        if parts + len(text) * len(args[0]) > MAX_TEXT:
            raise _Exhausted(f"it makes a text of more than {MAX_TEXT} characters")


def _bound_replace(text: str, old: str = "", new: str = "", *_: Any) -> None:
    if isinstance(new, str) and (text.count(old) + 1) * len(new) + len(text) > MAX_TEXT:
        raise _Exhausted(f"it makes a text of more than {MAX_TEXT} characters")


def _budgeted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def budgeted(*args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        return _bounded(function(*args, **kwargs))

    return budgeted


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
    return str(_bounded("".join(map(str, values))))


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > 16 or method != "common":
        raise _Exhausted("it rounds in a way that is not allowed")
    return round(value, precision)


def _sum(items: Iterable[Any], attribute: str | None = None, start: float = 0) -> float:
    return start + sum(float(item[attribute] if attribute else item) for item in _counted(items))


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern[:256])


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    own = {"replace": _replace, "join": _join, "indent": _indent, "tojson": _tojson}
    own |= {"round": _round, "sum": _sum}
    environment.filters = {
        name: _budgeted(own.get(name, environment.filters[name])) for name in _FILTERS
    }
    environment.filters["_counted"] = _counted
    environment.filters["_concat"] = _concat
    environment.filters["_emitted"] = _emitted
    environment.filters["_bounded"] = _bounded
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
            _fence(tree)
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
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._tokens
            )
        except _Refused as error:
            raise ValueError(f"the chat template refuses messages: {error}") from None
        except MemoryError:
            raise ValueError("the chat template failed: out of memory") from None
        except (_Exhausted, jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template failed: {error}") from error
        except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
            raise ValueError(f"the chat template failed on messages: {error}") from error
        finally:
            _budget.reset(token)


def _check_message(index: int, message: dict[str, Any]) -> None:
    role = message.get("role")
    if role not in _ROLES:
        raise ValueError(
            f"messages[{index}].role is {role!r}; one of {', '.join(_ROLES)} is accepted"
        )


def _fence(tree: nodes.Template) -> None:
    """Puts a counting filter around all that the sandbox does not see: what loops run
    over, what is put out, `a ~ b`, and literal collections."""
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, "_counted")
    for output in list(tree.find_all(nodes.Output)):
        output.nodes = [
            _filtered(
                nodes.Const(part.data) if isinstance(part, nodes.TemplateData) else part, "_emitted"
            )
            for part in output.nodes
        ]
    _replace_nodes(tree)


def _replace_nodes(parent: nodes.Node) -> None:
    for child in list(parent.iter_child_nodes()):
        _replace_nodes(child)
    for name, value in list(parent.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(parent, name, _fenced(value))
        elif isinstance(value, list):
            value[:] = [_fenced(v) if isinstance(v, nodes.Node) else v for v in value]


def _fenced(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        first, *rest = node.nodes
        return _filtered(first, "_concat", rest)
    is_value = isinstance(node, nodes.List | nodes.Dict) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    )
    return _filtered(node, "_bounded") if is_value else node


def _filtered(node: Any, name: str, args: list[Any] | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, args or [], [], None, None)
