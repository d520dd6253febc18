"""Bodies of the OpenAI requests: what is accepted, and errors that name what is not."""

import difflib
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from blitzd.http.errors import ApiError, bad_request
from blitzd.http.neutral import NEUTRAL_CHAT, NEUTRAL_COMPLETION, Neutral, shown, unsupported

MAX_CHOICES = 64
"""Generations of one request: `n` for each of its prompts."""
MAX_BIASES = 1024

_Count = Annotated[int, Meta(ge=1)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Top = Annotated[int, Meta(ge=0, le=20)]
_TokenId = Annotated[int, Meta(ge=0)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1000)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that chat and plain completions share."""

    model: str
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: _Share | None = None
    typical_p: _Share | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASES)] | None = None
    """By token id, as OpenAI has it: JSON's keys are strings."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    on_worker_loss: Literal["recompute", "fail"] | None = None

    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def wanted_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value if it was given."""
        return "max_tokens", self.max_tokens

    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. The fields typed `None` are what a client sends back when it appends our
    answer to the conversation; they may be there, but may not say anything."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]
    name: None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None
    tool_calls: None = None
    tool_call_id: None = None

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    top_logprobs: _Top | None = None

    def top(self) -> int | None:
        """How many of the best tokens are wanted beside each token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def wanted_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class CompletionRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    prompt: (
        str
        | Annotated[
            list[str | _TokenId | Annotated[list[_TokenId], Meta(min_length=1)]],
            Meta(min_length=1),
        ]
    )
    logprobs: _Top | None = None
    echo: bool | None = None
    best_of: _Count | None = None

    def top(self) -> int | None:
        """As for chat."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Raises ApiError when kinds are mixed or there are too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        items = self.prompt
        kinds = {type(item) for item in items}
        if len(kinds) > 1:
            raise bad_request(
                "prompt mixes kinds; accepted: a string, a list of strings, "
                "a list of token ids, or a list of lists of token ids",
                param="prompt",
                code="invalid_type",
            )
        if kinds == {int}:
            return [[item for item in items if isinstance(item, int)]]
        if len(items) > MAX_CHOICES:
            raise bad_request(
                f"prompt has {len(items)} entries; accepted: at most {MAX_CHOICES}", param="prompt"
            )
        if len(items) * (self.n or 1) > MAX_CHOICES:
            raise bad_request(
                f"n is {self.n} for {len(items)} prompts; accepted: at most {MAX_CHOICES} choices "
                "in all",
                param="n",
            )
        return [item for item in items if not isinstance(item, int)]


Body = ChatRequest | CompletionRequest

RequestType = TypeVar("RequestType", bound=Body)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError (400)."""
    request = _parse(body, ChatRequest, NEUTRAL_CHAT)
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) > 1:
        raise bad_request(
            "max_tokens and max_completion_tokens differ; accepted: one of them",
            param="max_tokens",
        )
    if request.top_logprobs and not request.logprobs:
        raise bad_request(
            f"top_logprobs is {request.top_logprobs}; accepted only with logprobs=true",
            param="top_logprobs",
        )
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError (400)."""
    request = _parse(body, CompletionRequest, NEUTRAL_COMPLETION)
    if request.best_of not in (None, request.n or 1):
        raise bad_request(
            f"best_of is not supported with the value {request.best_of}; accepted: that of n, "
            f"{request.n or 1}, or null",
            param="best_of",
            code="unsupported_parameter",
        )
    return request


def _parse(body: bytes, kind: type[RequestType], neutral: dict[str, Neutral]) -> RequestType:
    raw = parse_object(body)
    for name in [name for name in raw if name in neutral]:
        value = raw.pop(name)
        if value is not None and not neutral[name].accepts(value):
            raise unsupported(name, value, neutral[name])
    for name in raw:
        if name not in kind.__struct_fields__:
            raise unknown_parameter(name, [*kind.__struct_fields__, *neutral])
    try:
        request = msgspec.convert(raw, kind)
    except msgspec.ValidationError as failure:
        raise _explained(failure, raw) from None
    _check_together(request)
    return request


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises ApiError (400)."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as failure:
        reason = "nested too deeply" if isinstance(failure, RecursionError) else failure
        raise bad_request(
            f"the body is not valid JSON: {reason}", param=None, code="invalid_json"
        ) from None
    if not isinstance(raw, dict):
        raise bad_request(
            f"the body is {shown(raw)}; accepted: a JSON object", param=None, code="invalid_type"
        )
    return raw


def unknown_parameter(name: str, known: list[str]) -> ApiError:
    near = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return bad_request(
        f"unknown parameter {shown(name)}{hint}", param=name[:100], code="unknown_parameter"
    )


def _check_together(request: Body) -> None:
    if request.stream_options is not None:
        if not request.stream:
            raise bad_request(
                "stream_options is accepted only with stream=true", param="stream_options"
            )
        if request.stream_options.include_obfuscation:
            raise bad_request(
                "stream_options.include_obfuscation is not supported; accepted: false or null",
                param="stream_options.include_obfuscation",
                code="unsupported_parameter",
            )


_FIELD = re.compile(
    r"Object (?P<how>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL
)
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_CHOICES = {
    "role": '"system", "user" or "assistant"',
    "type": '"text"',
    "on_worker_loss": '"recompute" or "fail"',
}
_WORDS = {"`int`": "integer", "`float`": "number", "`str`": "string", "`bool`": "boolean"}


def _explained(failure: msgspec.ValidationError, raw: dict[str, Any]) -> ApiError:
    """msgspec's message as an error that names field, value and what is accepted."""
    # The client's own text may stand before the path, never after it: split at the last.
    what, _, path = str(failure).rpartition(" - at `$")
    what, path = (what, path.rstrip("`").lstrip(".")) if what else (path, "")
    path = path.removesuffix("[...]")  # in a value of an object; which one is not said
    if field := _FIELD.fullmatch(what):
        name = f"{path}.{field['name']}" if path else field["name"]
        if field["how"] == "missing required":
            return bad_request(f"{name} is missing", param=name, code="missing_required_parameter")
        return bad_request(f"unknown parameter {name}", param=name, code="unknown_parameter")
    if what.startswith("Invalid enum value"):
        accepted = _CHOICES[path.rpartition(".")[2]]
        code = "invalid_value"
    else:
        # "Expected `float` <= 2.0" or "Expected `int | null`, got `str`".
        accepted, _, wrong_type = what.removeprefix("Expected ").partition(", got ")
        code = "invalid_type" if wrong_type else "invalid_value"
        accepted = accepted.replace(" | ", "` or `")
        for word, meaning in _WORDS.items():
            accepted = accepted.replace(word, meaning)
        accepted = accepted.replace("`", "")
    return bad_request(
        f"{path} is {shown(_at(raw, path))}; accepted: {accepted}", param=path, code=code
    )


def _at(raw: Any, path: str) -> Any:
    for name, index in _STEP.findall(path):
        raw = raw[int(index)] if index else raw[name]
    return raw
