"""Logprobs as OpenAI's two routes show them."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from blitzd.node.face import ChatTokenizer, TokenLogprobs

LEAST = -9999.0
"""JSON has no infinity; OpenAI's clients know this number."""

Entry = tuple[int, TokenLogprobs | None]
"""A token and its logprobs; a prompt's first token has none."""


class Renderer(Protocol):
    """Of one choice."""

    def render(self, entries: Sequence[Entry]) -> Struct:
        """Of the next tokens, in order."""


class _Ranked(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class _ChatToken(_Ranked):
    top_logprobs: list[_Ranked]


class _ChatLogprobs(Struct):
    content: list[_ChatToken]
    refusal: None = None


class ChatRenderer:
    """`choices[].logprobs` of chat: a name and the exact bytes for each token."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def render(self, entries: Sequence[Entry]) -> Struct:
        return _ChatLogprobs(
            [
                _ChatToken(
                    *self._spelt(token, found.logprob),
                    [_Ranked(*self._spelt(*ranked)) for ranked in found.top],
                )
                for token, found in entries
                if found is not None
            ]
        )

    def _spelt(self, token: int, logprob: float) -> tuple[str, float, list[int] | None]:
        name, own = self._tokenizer.spell(token)
        return name, max(logprob, LEAST), list(own) or None


class _TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextRenderer:
    """`choices[].logprobs` of plain completions, where tokens are also keys: one that is not
    UTF-8 by itself is written as OpenAI does, `bytes:\\xf0\\x9f`."""

    def __init__(self, tokenizer: ChatTokenizer, echoed: str) -> None:
        """`echoed` is the prompt's text if the answer begins with it."""
        self._tokenizer = tokenizer
        self._echoed = echoed
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def render(self, entries: Sequence[Entry]) -> Struct:
        found = _TextLogprobs([], [], [], [])
        for token, logprobs in entries:
            name = self._name(token)
            found.tokens.append(name)
            found.text_offset.append(self._offset)
            self._advance(token)
            if logprobs is None:
                found.token_logprobs.append(None)
                found.top_logprobs.append(None)
                continue
            own = max(logprobs.logprob, LEAST)
            found.token_logprobs.append(own)
            # The token itself is always there: up to one more than was asked for.
            top = {self._name(ranked): max(value, LEAST) for ranked, value in logprobs.top}
            found.top_logprobs.append(top | {name: own})
        return found

    def _name(self, token: int) -> str:
        name, own = self._tokenizer.spell(token)
        if not own:
            return name
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def _advance(self, token: int) -> None:
        name, own = self._tokenizer.spell(token)
        text = self._decoder.decode(own)
        if self._offset >= len(self._echoed):
            self._offset += len(text)
            return
        # An echoed prompt is the client's own text: it may spell a special token out, and
        # lacks the space that SentencePiece puts first.
        for piece in (text, text.removeprefix(" "), "" if own else name):
            if self._echoed.startswith(piece, self._offset):
                self._offset += len(piece)
                if piece:
                    return
