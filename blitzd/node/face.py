"""The node's public face: everything that `http/`, the CLI and tests may know of a node.

The HTTP routes are written against `NodeFace` alone, so they run over the real daemon
and over a node in virtual time.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from blitzd.engine.token_logprobs import TokenLogprobs
from blitzd.node.operator import (
    MAX_DEADLINE_S,
    ROLES,
    ChangePolicy,
    Deactivate,
    Drain,
    GoLive,
    Mutate,
    OperatorCommand,
    Release,
    Remove,
    Restart,
    Scale,
    StopRestarts,
    Undrain,
)

__all__ = [
    "MAX_DEADLINE_S",
    "ROLES",
    "ChangePolicy",
    "ChatTokenizer",
    "CommandFailed",
    "Deactivate",
    "Delta",
    "Drain",
    "GenerateRequest",
    "Generation",
    "GenerationFailed",
    "GoLive",
    "Health",
    "HistogramData",
    "ModelCard",
    "Mutate",
    "NodeFace",
    "Observations",
    "OperatorCommand",
    "Release",
    "Remove",
    "RequestRefused",
    "Restart",
    "Scale",
    "StopRestarts",
    "TokenLogprobs",
    "Undrain",
]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation, already validated and tokenised."""

    prompt_tokens: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    """0 is greedy."""
    seed: int | None = None
    """None: the node draws one, so that the request can be repeated from the log."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    top_k: int = 0
    """0 keeps all, as do the other defaults below."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added to its logit)."""
    logprobs: int | None = None
    """How many of the best tokens are wanted beside each output token; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens but the first."""
    model: str = ""
    deadline_ms: int | None = None
    """From its arrival to its end; None: what the policy allows."""
    recompute: bool = True
    """When what was computed is lost with a worker: compute it again elsewhere, or fail."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What became certain since the last one. Text never ends inside a UTF-8 character
    and never contains a part of a stop string."""

    text: str
    token_ids: tuple[int, ...]
    finish: str | None = None
    """"stop" or "length" on the last delta, None before."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the next prompt tokens, from the second on; all before the first of `token_ids`."""
    cached_tokens: int = 0
    """On the first delta with tokens: prompt tokens that the prefix cache saved."""


class RequestRefused(Exception):
    """Not accepted: nothing was queued.

    `status` is the HTTP status that says it best (429 queue full, 503 draining, read-only
    or no replica), `retry_after_s` a hint, `code` a stable word for programs.
    """

    def __init__(self, message: str, *, status: int, code: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class CommandFailed(Exception):
    """An operator's command that was refused, or whose outcome is not known.

    `status` is the HTTP status that says it best (400 never accepted, 404 no such replica,
    409 not in this state, 503 not decided or not on disk), `code` a stable word for
    programs, `param` the field it was about.
    """

    def __init__(self, message: str, *, status: int, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class GenerationFailed(Exception):
    """An accepted request ended without finishing. The message says what happened."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class Generation(Protocol):
    """A running request. Iterate it to the end or `cancel` it; either frees everything."""

    request_id: int

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def cancel(self) -> None:
        """The client left. Idempotent, and a no-op after the end."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the OpenAI routes say of a model."""

    name: str
    created: int
    """Unix seconds."""
    context_tokens: int
    vocab_tokens: int
    """Token ids are in [0, vocab_tokens); prompts given as ids are checked against it."""
    digest: str
    licence: str = ""
    temperature: float = 1.0
    """Of a request that names none: what suits the model, else OpenAI's default."""
    owned_by: str = "blitzd"


@dataclass(frozen=True, slots=True)
class Health:
    live: bool
    """The driver moves."""
    ready: bool
    """A request sent now would be served."""
    draining: bool
    reasons: tuple[str, ...] = field(default=())
    """Why it is not ready, for people."""


class ChatTokenizer(Protocol):
    """What the routes need of the model's tokenizer. Its methods are called in other
    threads too, when the text is long."""

    def encode(self, text: str) -> list[int]: ...

    def spell(self, token_id: int) -> tuple[str, bytes]:
        """(a token's name for people, the bytes that it adds to the text: none for a special
        one). For every id of the model."""

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """The prompt text for `messages`, ready to encode (specials included).

        Raises ValueError, naming the message, when the template refuses it."""


class NodeFace(Protocol):
    @property
    def models(self) -> list[ModelCard]: ...

    def tokenizer(self, model: str) -> ChatTokenizer: ...

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns once the request is in the log as accepted. Raises RequestRefused."""

    def health(self) -> Health: ...

    def state(self) -> dict[str, Any]:
        """The folded state as `/admin/state` shows it (plain JSON types)."""

    async def command(self, command: OperatorCommand) -> list[dict[str, Any]]:
        """The events that it led to, in the form of `events`, once they are on disk; none if
        there was nothing to change. Raises CommandFailed."""

    def policy(self) -> dict[str, dict[str, int]]:
        """The values that decisions depend on, by name: {value, min, max}."""

    def events(self, since: int, limit: int, follow: bool) -> AsyncGenerator[dict[str, Any], None]:
        """At most `limit` log records with seq > `since` as JSON objects {seq, wall_ns,
        mono_ns, kind, type, cause, payload}; with `follow`, waits for more once the log's
        end is reached. A reader that leaves early closes it."""

    def observations(self) -> "Observations":
        """Latency observations since the start, for histograms."""


@dataclass(slots=True)
class Observations:
    """Durations that are not state, so that no fold holds them. Fed by the driver, read by
    the metrics page, which adds the bucket counts up."""

    ttft_s: "HistogramData"
    tpot_s: "HistogramData"
    queue_s: "HistogramData"
    e2e_s: "HistogramData"


@dataclass(slots=True)
class HistogramData:
    bounds: tuple[float, ...]
    """Upper bounds in seconds, ascending; +Inf is implied."""
    counts: list[int]
    """Observations in each bucket alone; one more bucket than bounds."""
    total: float = 0.0

    def observe(self, value: float) -> None:
        index = next((i for i, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))
        self.counts[index] += 1
        self.total += value
