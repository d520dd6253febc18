"""Parameters that we know, do not implement, and accept when their value changes nothing.

A client that spells out a default (`tools=[]`, `store=false`) gets what it asked for; any other
value is refused by name. `null` is accepted everywhere: it means "not given".
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blitzd.http.errors import ApiError, bad_request


@dataclass(frozen=True, slots=True)
class Neutral:
    accepts: Callable[[Any], bool]
    words: str
    """What is accepted, for the error message."""


def shown(value: Any) -> str:
    """`value` as JSON, cut to fit an error message."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 60 else text[:57] + "..."


def _only(*values: Any) -> Neutral:
    def accepts(value: Any) -> bool:
        # True == 1 in Python but not in JSON.
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)

    return Neutral(accepts, " or ".join(shown(v) for v in (*values, None)))


def _label() -> Neutral:
    return Neutral(lambda value: isinstance(value, str), "a string")


def _labels() -> Neutral:
    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())

    return Neutral(accepts, "an object of strings")


_COMMON = {
    "user": _label(),
    "metadata": _labels(),
}

NEUTRAL_COMPLETION = _COMMON | {
    "suffix": _only(""),
}

NEUTRAL_CHAT = _COMMON | {
    "best_of": _only(1),
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "parallel_tool_calls": _only(True, False),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "store": _only(False),
    "service_tier": _only("auto", "default"),
    "reasoning_effort": _only("none"),
    "verbosity": _only("medium"),
    "safety_identifier": _label(),
    "prompt_cache_key": _label(),
    "prompt_cache_options": _only(),
    "prompt_cache_retention": _only(),
    "prediction": _only(),
    "audio": _only(),
    "moderation": _only(),
    "web_search_options": _only(),
}


def unsupported(name: str, value: Any, neutral: Neutral) -> ApiError:
    return bad_request(
        f"{name} is not supported with the value {shown(value)}; accepted: {neutral.words}",
        param=name,
        code="unsupported_parameter",
    )
