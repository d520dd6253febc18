"""What the official `openai` client, and a client that reads the wire itself, must find.

`check_openai_surface(base_url, model)` can be pointed at any server of the API, a daemon
or a scripted one; it asserts and returns nothing. Prompts are short and outputs shorter,
so that it takes seconds also on a slow model.
"""

import json
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]
PROMPT = "The capital of France is"
TOKENS = 8
TIMEOUT_S = 120.0
REASONS = ("stop", "length")


def check_openai_surface(base_url: str, model: str) -> None:
    """`base_url` ends in `/v1`."""
    # Retries would hide a failure that comes and goes.
    with openai.OpenAI(
        base_url=base_url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        _check_models(client, model)
        _check_chat(client, model)
        _check_completion(client, model)
        _check_chat_stream(client, model)
        _check_completion_stream(client, model)
        _check_several_prompts(client, model)
        _check_choices(client, model)
        _check_chat_logprobs(client, model)
        _check_completion_logprobs(client, model)
        _check_every_parameter(client, model)
        _check_errors(client, model)
    for path in ("chat/completions", "completions"):
        _check_wire(base_url, path, model)


def _check_models(client: openai.OpenAI, model: str) -> None:
    assert model in [card.id for card in client.models.list()]
    card = client.models.retrieve(model)
    assert (card.id, card.object) == (model, "model")
    assert card.created > 0
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("no-such-model")
    assert missing.value.code == "model_not_found"


def _check_usage(usage: Any, tokens: int = TOKENS) -> None:
    assert usage.prompt_tokens > 0
    assert 0 < usage.completion_tokens <= tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def _check_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=TOKENS, temperature=0, seed=1
    )
    assert (answer.object, answer.model) == ("chat.completion", model)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in REASONS
    _check_usage(answer.usage)
    # The answer goes back as history, in the form in which the client holds it.
    again = client.chat.completions.create(
        model=model,
        messages=[*MESSAGES, choice.message, {"role": "user", "content": "And of Spain?"}],  # type: ignore[list-item]
        max_tokens=1,
        extra_body={"ignore_eos": True},
    )
    assert again.choices[0].finish_reason == "length"
    assert again.usage is not None
    assert again.usage.completion_tokens == 1


def _check_completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0, seed=1
    )
    assert (answer.object, answer.model) == ("text_completion", model)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason in REASONS
    _check_usage(answer.usage)


def _check_chat_stream(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=TOKENS, temperature=0
    )
    for usage in (False, True):
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=MESSAGES,
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
                **options,
            )
        )
        _check_chat_chunks(chunks, usage)
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == whole.choices[0].message.content
        if usage:
            assert chunks[-1].usage == whole.usage


def _check_chat_chunks(chunks: list[ChatCompletionChunk], usage: bool) -> None:
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    with_choice = chunks[:-1] if usage else chunks
    reasons = [c.choices[0].finish_reason for c in with_choice]
    assert reasons[-1] in REASONS
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert all(c.usage is None for c in with_choice)
    if usage:
        assert chunks[-1].choices == []
        _check_usage(chunks[-1].usage)


def _check_completion_stream(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    chunks = list(
        client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert {c.object for c in chunks} == {"text_completion"}
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def _check_several_prompts(client: openai.OpenAI, model: str) -> None:
    prompts = [PROMPT, "One, two, three,"]
    both = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0)
    assert [choice.index for choice in both.choices] == [0, 1]
    for choice, prompt in zip(both.choices, prompts, strict=True):
        alone = client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0)
        assert choice.text == alone.choices[0].text


def _check_choices(client: openai.OpenAI, model: str) -> None:
    def ask(n: int) -> Any:
        return client.completions.create(
            model=model, prompt=[PROMPT, "One, two,"], max_tokens=4, temperature=1, seed=5, n=n
        )

    one, three = ask(1), ask(3)
    assert [choice.index for choice in three.choices] == list(range(6))
    # A prompt's first choice is what it is without the others, and prompts count once.
    assert [three.choices[i].text for i in (0, 3)] == [choice.text for choice in one.choices]
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens >= one.usage.completion_tokens + 4
    chunks = client.completions.create(
        model=model,
        prompt=[PROMPT, "One, two,"],
        max_tokens=4,
        temperature=1,
        seed=5,
        n=3,
        stream=True,
    )
    texts = [""] * 6
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in three.choices]


def _check_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=TOKENS, temperature=0, **fields
        )

    assert ask().choices[0].logprobs is None
    assert ask(logprobs=False, top_logprobs=0).choices[0].logprobs is None
    (bare,) = ask(logprobs=True).choices
    assert all(entry.top_logprobs == [] for entry in bare.logprobs.content)
    whole = ask(logprobs=True, top_logprobs=3)
    (choice,) = whole.choices
    content = choice.logprobs.content
    assert len(content) == whole.usage.completion_tokens
    said = b"".join(bytes(entry.bytes or []) for entry in content)
    assert said.decode() == choice.message.content
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        values = [ranked.logprob for ranked in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        # Greedy: what was chosen is the best.
        best = entry.top_logprobs[0]
        assert (entry.token, entry.logprob) == (best.token, best.logprob)
    streamed = [
        entry
        for chunk in ask(logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def _check_completion_logprobs(client: openai.OpenAI, model: str) -> None:
    def ask(**fields: Any) -> Any:
        return client.completions.create(
            model=model, prompt=PROMPT, max_tokens=4, temperature=0, **fields
        )

    assert ask().choices[0].logprobs is None
    (plain,) = ask(logprobs=2).choices
    whole = ask(logprobs=2, echo=True)
    (echoed,) = whole.choices
    assert echoed.text == PROMPT + plain.text
    found = echoed.logprobs
    count = whole.usage.prompt_tokens + whole.usage.completion_tokens
    columns = (found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset)
    assert [len(column) for column in columns] == [count] * 4
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    for token, value, top in list(zip(*columns[:3], strict=True))[1:]:
        assert top[token] == value <= 0
        assert 2 <= len(top) <= 3
    assert "".join(found.tokens[: whole.usage.prompt_tokens]) == PROMPT
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert echoed.text[offset:].startswith(token) or offset == len(echoed.text)
    tail = found.tokens[whole.usage.prompt_tokens :]
    assert tail == plain.logprobs.tokens
    assert plain.logprobs.text_offset[0] == 0
    chunks = list(ask(logprobs=2, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.text
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [t for part in parts for t in part.tokens] == found.tokens
    assert [o for part in parts for o in part.text_offset] == found.text_offset
    (only_echo,) = ask(echo=True).choices
    assert (only_echo.text, only_echo.logprobs) == (echoed.text, None)


def _check_every_parameter(client: openai.OpenAI, model: str) -> None:
    def ask() -> Any:
        return client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=TOKENS,
            temperature=1.2,
            seed=-3,
            top_p=0.95,
            presence_penalty=0.3,
            frequency_penalty=-0.3,
            logit_bias={"1": -100},
            stop=["never there"],
            extra_body={
                "top_k": 50,
                "min_p": 0.01,
                "typical_p": 0.95,
                "repetition_penalty": 1.1,
                "stop_token_ids": [3],
                "min_tokens": 2,
            },
        )

    first = ask()
    _check_usage(first.usage)
    assert ask().choices[0].message.content == first.choices[0].message.content


def _check_errors(client: openai.OpenAI, model: str) -> None:
    def chat(**fields: Any) -> None:
        wanted: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 1}
        client.chat.completions.create(**(wanted | fields))

    with pytest.raises(openai.NotFoundError) as unknown:
        chat(model="no-such-model")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"top_p": 2}, "top_p", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field", "unknown_parameter"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": "word " * 100_000}]},
            "messages",
            "context_length_exceeded",
        ),
    ]
    for fields, param, code in refused:
        with pytest.raises(openai.BadRequestError) as bad:
            chat(**fields)
        assert (bad.value.param, bad.value.code) == (param, code), bad.value
        assert param in str(bad.value)
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt="x", max_tokens=-1)
    assert bad.value.param == "max_tokens"


def _check_wire(base_url: str, path: str, model: str) -> None:
    """What the official client is lenient about: frames, the end mark, keys that are null."""
    body: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "stream": True}
    body |= {"messages": MESSAGES} if path.startswith("chat") else {"prompt": PROMPT}
    with _post(f"{base_url}/{path}", json.dumps(body).encode()) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Request-Id"] == "conformance"
        data: bytes = response.read()
    assert data.endswith(b"data: [DONE]\n\n")
    *events, _, end = data.split(b"\n\n")
    assert end == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert all("finish_reason" in chunk["choices"][0] for chunk in chunks)
    assert not any("usage" in chunk for chunk in chunks)
    with pytest.raises(urllib.error.HTTPError) as bad:
        _post(f"{base_url}/{path}", b"{broken")
    assert bad.value.code == 400
    assert json.loads(bad.value.read())["error"]["code"] == "invalid_json"


def _post(url: str, body: bytes) -> Any:
    headers = {"Content-Type": "application/json", "X-Request-Id": "conformance"}
    request = urllib.request.Request(url, body, headers)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)
