"""One choice of an answer: what came of it that the client has not got yet."""

from itertools import islice

from msgspec import Struct

from blitzd.http.logprobs import Entry, Renderer
from blitzd.node.face import Delta


class Choice:
    def __init__(
        self, prompt: tuple[int, ...], echoed: str | None, renderer: Renderer | None
    ) -> None:
        """`prompt` are the prompt's tokens, `echoed` its text if the answer begins with it,
        `renderer` is there if logprobs are wanted."""
        self.finish: str | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._text = [echoed] if echoed else []
        self._renderer = renderer
        self._entries: list[Entry] = []
        self._prompt = iter(prompt if echoed is not None and renderer is not None else ())
        for token in islice(self._prompt, 1):
            self._entries.append((token, None))

    def take(self, delta: Delta) -> None:
        self.finish = delta.finish
        self.completion_tokens += len(delta.token_ids)
        self.cached_tokens += delta.cached_tokens
        if delta.text:
            self._text.append(delta.text)
        if self._renderer is None:
            return
        scored = zip(delta.prompt_logprobs, self._prompt, strict=False)
        self._entries += [(token, found) for found, token in scored]
        self._entries += zip(delta.token_ids, delta.logprobs, strict=True)

    @property
    def due(self) -> bool:
        """There is something to say. Nothing before the first token; logprobs of tokens
        whose text is not certain yet wait for it."""
        return self.finish is not None or (self.completion_tokens > 0 and bool(self._text))

    def flush(self) -> tuple[str, Struct | None]:
        """(text, logprobs) since the last time."""
        text = "".join(self._text)
        self._text.clear()
        if self._renderer is None or not self._entries:
            return text, None
        entries, self._entries = self._entries, []
        return text, self._renderer.render(entries)
