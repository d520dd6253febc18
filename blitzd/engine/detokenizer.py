"""Output tokens to text, as they come.

The text given out so far is a function of the tokens fed so far and of nothing else, so
a request that is resumed elsewhere goes on where it was by feeding its tokens again.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


class Detokenizer:
    """One per request. Never gives a part of a UTF-8 character, nor text that may still
    turn out to be the beginning of a stop string, nor anything from a stop string on. Of
    several the one that is complete first ends the output, wherever the tokens' borders are.

    Cost per token grows with the token's own length and with the longest stop string, not
    with the output.
    """

    def __init__(
        self, tokenizer: TokenBytes, stop: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        """Stop strings are not looked for in the text of the first `min_tokens` tokens."""
        if any(not text for text in stop):
            raise ValueError("a stop string is empty; it would end every output at once")
        self._token_bytes = tokenizer.token_bytes
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._exempt = min_tokens
        self.stopped = False

    def feed(self, token_id: int) -> tuple[str, bool]:
        """(text that became certain, whether a stop string ended the output). After the
        end nothing comes any more."""
        if self.stopped:
            return "", True
        text = self._decoder.decode(self._token_bytes(token_id))
        if self._exempt > 0:
            self._exempt -= 1
            return text, False
        if not self._stop:
            return text, False
        return self._release(text)

    def flush(self) -> str:
        """What was held back, when the output ends for another reason than a stop string.
        A character cut short becomes U+FFFD, and where that completes a stop string the text
        ends before it and `stopped` is true: a client never sees a stop string of its own."""
        if self.stopped:
            return ""
        tail = self._decoder.decode(b"", final=True)
        text, _ = self._release(tail) if self._stop else (tail, False)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _release(self, text: str) -> tuple[str, bool]:
        if not text:
            return "", False
        pending = self._held + text
        found = [(at + len(stop), at) for stop in self._stop if (at := pending.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return pending[: min(found)[1]], True
        keep = self._undecided(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def _undecided(self, pending: str) -> int:
        """Length of the longest end of `pending` that begins a stop string."""
        for length in range(min(self._longest - 1, len(pending)), 0, -1):
            end = pending[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
