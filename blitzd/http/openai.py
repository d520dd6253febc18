"""The OpenAI routes: models, chat completions, completions."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import ParamSpec, TypeVar

import msgspec
from aiohttp import web

from blitzd.http import prepare, schema
from blitzd.http.body import read_json_body
from blitzd.http.choice import Choice
from blitzd.http.errors import as_api_error
from blitzd.http.generation import deltas, running
from blitzd.http.limits import Limits
from blitzd.http.logprobs import ChatRenderer, TextRenderer
from blitzd.http.stream import ReaderGone, Stream
from blitzd.http.tasks import TaskOwner
from blitzd.http.wire import (
    DONE,
    STILL_HERE,
    ChatWire,
    CompletionWire,
    Head,
    Piece,
    PromptDetails,
    Usage,
    Wire,
    frame,
)
from blitzd.node.face import ChatTokenizer, Generation, ModelCard, NodeFace

P = ParamSpec("P")
T = TypeVar("T")

_INLINE_BYTES = 16 * 1024


class OpenAIRoutes:
    def __init__(self, node: NodeFace, owner: TaskOwner, limits: Limits) -> None:
        self._node = node
        self._owner = owner
        self._limits = limits

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            # A model's name may contain slashes.
            web.get("/v1/models/{name:.+}", self.model),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    async def models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_card(card) for card in self._node.models]})

    async def model(self, request: web.Request) -> web.Response:
        return _json(_card(prepare.card_of(self._node, request.match_info["name"])))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        raw = await read_json_body(request, self._limits)
        body = await _sized(raw, schema.parse_chat, raw)
        card, tokenizer = self._model(body)
        wanted = await _sized(raw, prepare.of_chat, card, tokenizer, body)
        return await self._answer(request, body, tokenizer, wanted)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        raw = await read_json_body(request, self._limits)
        body = await _sized(raw, schema.parse_completion, raw)
        card, tokenizer = self._model(body)
        wanted = await _sized(raw, prepare.of_completion, card, tokenizer, body)
        return await self._answer(request, body, tokenizer, wanted)

    def _model(self, body: schema.Body) -> tuple[ModelCard, ChatTokenizer]:
        card = prepare.card_of(self._node, body.model)
        return card, self._node.tokenizer(card.name)

    async def _answer(
        self,
        request: web.Request,
        body: schema.Body,
        tokenizer: ChatTokenizer,
        wanted: Sequence[prepare.Wanted],
    ) -> web.StreamResponse:
        asked = [choice.request for choice in wanted]
        choices = [_choice(body, tokenizer, one) for one in wanted]
        async with running(self._node, asked, self._owner, self._limits) as generations:
            wire = self._wire(body, generations[0].request_id)
            if not body.stream:
                async with aclosing(deltas(generations, self._limits)) as incoming:
                    async for index, delta in incoming:
                        choices[index].take(delta)
                pieces = [Piece(*choice.flush(), choice.finish) for choice in choices]
                whole = wire.whole(pieces, _usage(wanted, choices))
                return web.Response(body=whole, content_type="application/json")
            stream = Stream(request, self._limits, "text/event-stream; charset=utf-8")
            try:
                async with stream.kept_alive(STILL_HERE):
                    await self._stream(stream, wire, generations, choices)
                end = wire.usage(_usage(wanted, choices)) if body.wants_usage() else b""
                await stream.send(end + DONE)
            except ReaderGone:
                pass  # nobody is left to tell; leaving the block frees the generations
            except Exception as failure:
                if not stream.opened:
                    raise
                await stream.send_last(frame(as_api_error(failure).body()))
            return stream.response

    def _wire(self, body: schema.Body, request_id: int) -> Wire:
        card = prepare.card_of(self._node, body.model)
        kind, prefix = (
            (ChatWire, "chatcmpl")
            if isinstance(body, schema.ChatRequest)
            else (CompletionWire, "cmpl")
        )
        return kind(
            Head(
                # The request's number in the log: what an operator needs to look it up.
                id=f"{prefix}-{request_id}",
                created=int(time.time()),
                model=card.name,
                fingerprint=f"fp_{card.digest[:12]}",
                include_usage=body.wants_usage(),
            )
        )

    async def _stream(
        self,
        stream: Stream,
        wire: Wire,
        generations: Sequence[Generation],
        choices: Sequence[Choice],
    ) -> None:
        """Nothing is sent before there is text or an end, so that a failure before it is a
        status code, and a client's time to first token is not that of an empty frame."""
        async with aclosing(deltas(generations, self._limits)) as incoming:
            async for index, delta in incoming:
                choice = choices[index]
                choice.take(delta)
                if choice.due:
                    frames = b"" if stream.opened else wire.opening(len(choices))
                    piece = Piece(*choice.flush(), choice.finish)
                    await stream.send(frames + wire.piece(index, piece))


def _choice(body: schema.Body, tokenizer: ChatTokenizer, wanted: prepare.Wanted) -> Choice:
    renderer: ChatRenderer | TextRenderer | None = None
    if body.top() is not None:
        renderer = (
            ChatRenderer(tokenizer)
            if isinstance(body, schema.ChatRequest)
            else TextRenderer(tokenizer, wanted.echoed or "")
        )
    return Choice(wanted.request.prompt_tokens, wanted.echoed, renderer)


def _usage(wanted: Sequence[prepare.Wanted], choices: Sequence[Choice]) -> Usage:
    """A prompt counts once, however many choices it has."""
    first = [(w.request, c) for w, c in zip(wanted, choices, strict=True) if w.first]
    prompt_tokens = sum(len(request.prompt_tokens) for request, _ in first)
    completion_tokens = sum(choice.completion_tokens for choice in choices)
    return Usage(
        prompt_tokens,
        completion_tokens,
        prompt_tokens + completion_tokens,
        PromptDetails(sum(choice.cached_tokens for _, choice in first)),
    )


async def _sized(raw: bytes, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` on the body `raw`: in a thread if it is long, so that one client's long
    prompt does not hold up the tokens of the others."""
    if len(raw) <= _INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def _card(card: ModelCard) -> dict[str, object]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        # Beyond OpenAI's four: what a client needs to size its prompts, and the licence.
        "context_window": card.context_tokens,
        "licence": card.licence,
        "digest": card.digest,
    }


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
