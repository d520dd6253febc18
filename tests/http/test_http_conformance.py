"""The official client against the scripted node, and that the check can fail."""

import asyncio
from typing import Any

import openai
import pytest

from blitzd.node.face import GenerateRequest, GenerationFailed, RequestRefused
from tests.e2e.conformance import MESSAGES, check_openai_surface
from tests.http.scripted_node import MODEL, Script, ScriptedNode, say
from tests.http.served import Served, served


def answer(request: GenerateRequest) -> Script:
    """A word of six pieces, cut off at `max_tokens`; what it is depends on the prompt."""
    word = [*"Paris", chr(97 + sum(request.prompt_tokens) % 26)]
    if request.max_tokens <= len(word):
        return say(*word[: request.max_tokens], finish="length")
    return say(*word)


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="x", max_retries=0, timeout=10.0)


def test_the_official_client_finds_what_it_expects() -> None:
    node = ScriptedNode(answer)
    with served(node) as server:
        check_openai_surface(server.url, MODEL)
    assert node.open == {}


def test_the_check_fails_where_streams_and_answers_differ() -> None:
    node = ScriptedNode(lambda request: say(str(node.made), "x"))
    with served(node) as server, pytest.raises(AssertionError):
        check_openai_surface(server.url, MODEL)


def test_the_async_client() -> None:
    async def talk(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True
            )
            return [chunk.choices[0].delta.content or "" async for chunk in stream]

    with served(ScriptedNode(say("a", "b"))) as server:
        assert asyncio.run(talk(server.url)) == ["", "a", "b", ""]


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_failure_in_mid_stream_is_an_api_error(kind: str) -> None:
    failure = GenerationFailed("decode replica d0 died", code="replica_lost")
    with served(ScriptedNode([*say("a", finish=None), failure])) as server:
        client = client_of(server)
        stream: Any = (
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            if kind == "chat"
            else client.completions.create(model=MODEL, prompt="x", stream=True)
        )
        with pytest.raises(openai.APIError, match="decode replica d0 died") as caught:
            for _ in stream:
                pass
    assert caught.value.code == "replica_lost"


def test_a_full_queue_is_a_rate_limit_error() -> None:
    full = RequestRefused("the queue is full", status=429, code="queue_full", retry_after_s=3)
    with (
        served(ScriptedNode(refuse=lambda request: full)) as server,
        pytest.raises(openai.RateLimitError, match="queue is full") as caught,
    ):
        client_of(server).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.response.headers["Retry-After"] == "3"


def test_a_retry_after_a_refusal_succeeds() -> None:
    refusals = [RequestRefused("draining", status=503, code="draining", retry_after_s=0)]
    node = ScriptedNode(refuse=lambda request: refusals.pop() if refusals else None)
    with served(node) as server:
        client = client_of(server).with_options(max_retries=1)
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Paris."
    assert len(node.asked) == 2
