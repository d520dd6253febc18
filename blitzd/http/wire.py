"""The JSON objects of OpenAI's answers, whole and in chunks.

Shapes follow OpenAI's API reference: in every chunk `finish_reason` is there and null,
except in a choice's last one; with `include_usage`, `usage` is null in every chunk but an
extra last one, whose `choices` is empty; without it the key is absent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
STILL_HERE = b": still here\n\n"
"""A comment, which clients pass over (WHATWG HTML, 9.2.6)."""


class PromptDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Piece(NamedTuple):
    """Of one choice: more of it, or all."""

    text: str
    logprobs: Struct | None
    finish: str | None


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer share."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    fingerprint: str
    include_usage: bool = False


class Wire(Protocol):
    """How one kind of completion looks on the wire. Frames are complete SSE events."""

    def opening(self, choices: int) -> bytes:
        """The frames that come before any text."""

    def piece(self, index: int, piece: Piece) -> bytes:
        """The frames for more text of choice `index`, and its end."""

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""


class _Answer(Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[Struct]
    usage: Usage | UnsetType | None = UNSET


class _ChatDelta(Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _ChatChunkChoice(Struct):
    index: int
    delta: _ChatDelta
    logprobs: Struct | None = None
    finish_reason: str | None = None


class _ChatMessage(Struct):
    role: str
    content: str
    refusal: None = None


class _ChatChoice(Struct):
    index: int
    message: _ChatMessage
    logprobs: Struct | None
    finish_reason: str | None


class _TextChoice(Struct):
    index: int
    text: str
    logprobs: Struct | None
    finish_reason: str | None


def frame(body: Struct) -> bytes:
    """`body` as one SSE event.

    JSON allows U+0085, U+2028 and U+2029 in strings, but many clients split a stream with
    a splitter that takes these for line ends: they are escaped.
    """
    data = _encode(body)
    if not data.isascii():
        data = (
            data.replace(b"\xc2\x85", b"\\u0085")
            .replace(b"\xe2\x80\xa8", b"\\u2028")
            .replace(b"\xe2\x80\xa9", b"\\u2029")
        )
    return b"data: " + data + b"\n\n"


def _answer(head: Head, kind: str, choices: Sequence[Struct]) -> _Answer:
    return _Answer(head.id, kind, head.created, head.model, head.fingerprint, choices)


def _chunk(head: Head, kind: str, choice: Struct) -> bytes:
    answer = _answer(head, kind, [choice])
    answer.usage = None if head.include_usage else UNSET
    return frame(answer)


@dataclass(frozen=True, slots=True)
class ChatWire:
    """`chat.completion` and `chat.completion.chunk`."""

    head: Head

    def opening(self, choices: int) -> bytes:
        return b"".join(
            self._chunk(index, _ChatDelta(role="assistant", content="")) for index in range(choices)
        )

    def piece(self, index: int, piece: Piece) -> bytes:
        frames = b""
        if piece.text or piece.logprobs is not None:
            frames = self._chunk(index, _ChatDelta(content=piece.text), piece.logprobs)
        if piece.finish is not None:
            frames += self._chunk(index, _ChatDelta(), finish=piece.finish)
        return frames

    def usage(self, usage: Usage) -> bytes:
        answer = _answer(self.head, "chat.completion.chunk", [])
        answer.usage = usage
        return frame(answer)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        answer = _answer(
            self.head,
            "chat.completion",
            [
                _ChatChoice(index, _ChatMessage("assistant", text), logprobs, finish)
                for index, (text, logprobs, finish) in enumerate(pieces)
            ],
        )
        answer.usage = usage
        return _encode(answer)

    def _chunk(
        self,
        index: int,
        delta: _ChatDelta,
        logprobs: Struct | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = _ChatChunkChoice(index, delta, logprobs, finish)
        return _chunk(self.head, "chat.completion.chunk", choice)


@dataclass(frozen=True, slots=True)
class CompletionWire:
    """`text_completion`, the same for whole answers and chunks."""

    head: Head

    def opening(self, choices: int) -> bytes:
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        return _chunk(self.head, "text_completion", _TextChoice(index, *piece))

    def usage(self, usage: Usage) -> bytes:
        answer = _answer(self.head, "text_completion", [])
        answer.usage = usage
        return frame(answer)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        answer = _answer(
            self.head,
            "text_completion",
            [_TextChoice(index, *piece) for index, piece in enumerate(pieces)],
        )
        answer.usage = usage
        return _encode(answer)
