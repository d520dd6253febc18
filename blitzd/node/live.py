"""Requests under way as their clients see them: text and tokens on their way out.

None of this is state: it lives in the daemon's memory, holds what a resume needs (prompt,
tokens sent, seed), and dies with the client's connection.
"""

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import xxhash

from blitzd.node.face import (
    Delta,
    GenerateRequest,
    GenerationFailed,
    RequestRefused,
    TokenLogprobs,
)

STATUS_OF_REFUSAL = {"queue_full": 429, "draining": 503, "read_only": 503, "too_long": 400}


class LiveRequest:
    """One accepted, or not yet accepted, request and its client's side."""

    def __init__(
        self,
        request_id: int,
        request: GenerateRequest,
        seed: int,
        on_cancel: Callable[[int], Awaitable[None]],
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.seed = seed
        self.attempt = 0
        """Resumes so far."""
        self.arrived = 0
        """The last lease whose target has made a token."""
        self.output: list[int] = []
        self._scored = 1
        """The next prompt position whose logprobs the client has not got."""
        self.submitted_ns = 0
        self.first_token_ns = 0
        self.last_token_ns = 0
        self._on_cancel = on_cancel
        self._decided = anyio.Event()
        self._refusal: RequestRefused | None = None
        self._deltas: deque[Delta] = deque()
        self._failure: GenerationFailed | None = None
        self._ended = False
        self._news = anyio.Event()

    # The driver's side.

    def accept(self) -> None:
        self._decided.set()

    def refuse(self, code: str, reason: str) -> None:
        self._refusal = RequestRefused(reason, status=STATUS_OF_REFUSAL[code], code=code)
        self._ended = True
        self._decided.set()

    def push(
        self,
        text: str,
        token_id: int,
        logprobs: TokenLogprobs | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """Bounded by max_tokens: a worker sends no more than that."""
        # A resume elsewhere has its own cache hits; the client was told of the first.
        cached = 0 if self.output else cached_tokens
        self.output.append(token_id)
        scores = () if logprobs is None else (logprobs,)
        self._tell(Delta(text, (token_id,), logprobs=scores, cached_tokens=cached))

    def push_prompt(self, position: int, logprobs: TokenLogprobs) -> None:
        """A prompt that is computed again is scored again, and a client wants that once."""
        if position == self._scored:
            self._scored += 1
            self._tell(Delta("", (), prompt_logprobs=(logprobs,)))

    def resume(self) -> None:
        """The client sees a pause, and nothing else."""
        self.attempt += 1

    def finish(self, reason: str) -> None:
        self._ended = True
        self._tell(Delta("", (), reason))

    def fail(self, code: str, reason: str) -> None:
        self._ended = True
        self._failure = GenerationFailed(reason, code=code)
        self._news.set()
        self._decided.set()

    def abandon(self, code: str, reason: str) -> None:
        """Nobody will decide about it, or end it, any more."""
        if self._decided.is_set():
            self.fail(code, reason)
        else:
            self.refuse(code, reason)

    def _tell(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._news.set()

    def runs(self, attempt: int) -> bool:
        """Whether that attempt is wanted still."""
        return attempt == self.attempt and not self._ended

    def output_digest(self) -> str:
        """xxh3-64 of the output token ids as little-endian u32, in hex."""
        packed = b"".join(token.to_bytes(4, "little") for token in self.output)
        return xxhash.xxh3_64_hexdigest(packed)

    # The client's side (`face.Generation`).

    async def decided(self) -> None:
        """Returns once the request is accepted. Raises RequestRefused."""
        await self._decided.wait()
        if self._refusal is not None:
            raise self._refusal

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            while self._deltas:
                delta = self._deltas.popleft()
                yield delta
                if delta.finish is not None:
                    return
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return
            self._news = anyio.Event()
            await self._news.wait()

    async def cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._news.set()
            await self._on_cancel(self.request_id)
