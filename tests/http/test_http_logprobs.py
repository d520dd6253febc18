"""Logprobs, echo and several choices on the wire, in both routes' forms."""

from typing import Any

import pytest

from blitzd.node.face import Delta, GenerateRequest, TokenLogprobs
from tests.http.scripted_node import Script, ScriptedNode, say
from tests.http.served import frames, served

A, B = ord("a"), ord("b")


def scores(*values: float, top: int = 0) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(value, [(B, value), (200, -3.0)][:top]) for value in values)


def test_chat_logprobs_have_names_and_bytes() -> None:
    script = [
        Delta("a", (A,), logprobs=scores(-0.5, top=2)),
        Delta("", (0xC3,), logprobs=scores(-1.0)),
        Delta("é", (0xA9,), logprobs=scores(float("-inf"))),
        Delta("", (299,), "stop", logprobs=scores(-0.125)),
    ]
    with served(ScriptedNode(script)) as server:
        whole = server.chat(logprobs=True, top_logprobs=2).json["choices"][0]
        *chunks, _ = frames(server.chat(logprobs=True, top_logprobs=2, stream=True).body)
    content = whole["logprobs"]["content"]
    assert whole["logprobs"]["refusal"] is None
    assert content[0] == {
        "token": "a",
        "bytes": [A],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "b", "bytes": [B], "logprob": -0.5},
            {"token": "\ufffd", "bytes": [200], "logprob": -3.0},
        ],
    }
    assert [entry["bytes"] for entry in content] == [[A], [0xC3], [0xA9], None]
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd", "<|299|>"]
    # JSON has no infinity.
    assert [entry["logprob"] for entry in content] == [-0.5, -1.0, -9999.0, -0.125]
    assert all(set(c["choices"][0]) >= {"logprobs", "finish_reason"} for c in chunks)
    parts = [c["choices"][0]["logprobs"] for c in chunks]
    # Those of a token whose text is not certain yet come with its text.
    assert [len(part["content"]) if part else None for part in parts] == [None, 1, 2, 1, None]
    assert [entry for part in parts if part for entry in part["content"]] == content


def test_completion_logprobs_have_offsets_and_the_token_among_the_best() -> None:
    script = [
        Delta("a", (A,), logprobs=scores(-0.5, top=2)),
        Delta("", (0xC3,), logprobs=scores(-1.0)),
        Delta("éb", (0xA9, B), logprobs=scores(-2.0, -0.25, top=1)),
        Delta("", (299,), "stop", logprobs=scores(-0.125)),
    ]
    with served(ScriptedNode(script)) as server:
        choice = server.complete(logprobs=2).json["choices"][0]
        *chunks, _ = frames(server.complete(logprobs=2, stream=True).body)
    assert choice["text"] == "aéb"
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "<|299|>"],
        "token_logprobs": [-0.5, -1.0, -2.0, -0.25, -0.125],
        "top_logprobs": [
            {"b": -0.5, "bytes:\\xc8": -3.0, "a": -0.5},
            {"bytes:\\xc3": -1.0},
            {"b": -2.0, "bytes:\\xa9": -2.0},
            {"b": -0.25},
            {"<|299|>": -0.125},
        ],
        "text_offset": [0, 1, 1, 2, 3],
    }
    parts = [c["choices"][0]["logprobs"] for c in chunks]
    for column, values in choice["logprobs"].items():
        assert [value for part in parts if part for value in part[column]] == values


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_and_its_logprobs_first(stream: bool) -> None:
    with served(ScriptedNode(say("x", "y"))) as server:
        answer = server.complete(prompt="Hé", echo=True, logprobs=1, max_tokens=2, stream=stream)
        plain = server.complete(prompt=[72, 105], echo=True).json["choices"][0]
        assert [asked.prompt_logprobs for asked in server.node.asked] == [1, None]
    choices = (
        [chunk["choices"][0] for chunk in frames(answer.body)[:-1]]
        if stream
        else answer.json["choices"]
    )
    assert choices[0]["text"] == ("Héx" if stream else "Héxy")
    assert "".join(choice["text"] for choice in choices) == "Héxy"
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    columns = {name: [v for part in parts for v in part[name]] for name in parts[0]}
    assert columns["tokens"] == ["H", "bytes:\\xc3", "bytes:\\xa9", "x", "y"]
    assert columns["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert columns["top_logprobs"][0] is None
    assert columns["text_offset"] == [0, 1, 1, 2, 3]
    assert (plain["text"], plain["logprobs"]) == ("Hixy", None)


def by_seed(request: GenerateRequest) -> Script:
    return say("p" if request.prompt_tokens == (A,) else "q", str(request.seed))


def test_n_choices_have_seeds_of_their_own_and_share_their_prompt() -> None:
    with served(ScriptedNode(by_seed)) as server:
        one = server.complete(prompt=["a", "bb"], seed=-1).json
        three = server.complete(prompt=["a", "bb"], seed=-1, n=3).json
        again = server.complete(prompt=["a", "bb"], seed=-1, n=3).json
        server.chat(n=2)
    assert [choice["index"] for choice in three["choices"]] == list(range(6))
    texts = [choice["text"] for choice in three["choices"]]
    assert [text[0] for text in texts] == list("pppqqq")
    assert len({text[1:] for text in texts}) == 3
    assert [texts[0], texts[3]] == [choice["text"] for choice in one["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert (three["usage"]["prompt_tokens"], three["usage"]["completion_tokens"]) == (3, 12)
    # Without a seed the node draws one for each.
    assert [asked.seed for asked in server.node.asked[-2:]] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_those_of_each_prompts_first_choice(stream: bool) -> None:
    made = iter(range(100))

    def script(request: GenerateRequest) -> Script:
        first = Delta("x", (1,), cached_tokens=10 + next(made))
        return [first, Delta("", (2,), "stop")]

    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    with served(ScriptedNode(script)) as server:
        answer = server.complete(prompt=["x" * 50] * 2, n=2, stream=stream, **options)
    usage = (frames(answer.body)[-2] if stream else answer.json)["usage"]
    assert usage == {
        "prompt_tokens": 100,
        "completion_tokens": 8,
        "total_tokens": 108,
        "prompt_tokens_details": {"cached_tokens": 10 + 12},
    }
