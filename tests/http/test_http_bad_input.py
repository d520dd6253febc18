"""Bad input: refused with 4xx, by name, with what would be accepted; never ignored."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.scripted_node import MODEL, ScriptedNode
from tests.http.served import Answer, Served, chat_body, post, served

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(ScriptedNode()) as running:
        yield running


def send(server: Served, path: str, fields: dict[str, Any]) -> Answer:
    base = chat_body() if path == CHAT else {"model": MODEL, "prompt": "Hi"}
    body = base | fields
    return server.ask("POST", path, {k: v for k, v in body.items() if v is not ...})


BOTH = [
    # fields, param, code, words that the message must have
    ({"model": ...}, "model", "missing_required_parameter", ["model"]),
    ({"model": None}, "model", "invalid_type", ["null", "string"]),
    ({"model": 3}, "model", "invalid_type", ["3", "string"]),
    ({"temperature": 2.5}, "temperature", "invalid_value", ["2.5", "<= 2"]),
    ({"temperature": -1}, "temperature", "invalid_value", ["-1", ">= 0"]),
    ({"temperature": "hot"}, "temperature", "invalid_type", ["hot", "number"]),
    ({"temperature": True}, "temperature", "invalid_type", ["true", "number"]),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", ["0", ">= 1"]),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type", ["1.5", "integer"]),
    ({"max_tokens": 10_000}, "max_tokens", "context_length_exceeded", ["10000", "512"]),
    ({"max_tokens": 10**30}, "max_tokens", "context_length_exceeded", ["512"]),
    ({"seed": 2**63}, "seed", "invalid_value", ["9223372036854775808"]),
    ({"seed": "x"}, "seed", "invalid_type", ["integer"]),
    ({"stop": ""}, "stop", "invalid_value", [">= 1"]),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value", [">= 1"]),
    ({"stop": ["a"] * 5}, "stop", "invalid_value", ["<= 4"]),
    ({"stop": [1]}, "stop[0]", "invalid_type", ["1", "string"]),
    ({"stop": {"a": 1}}, "stop", "invalid_type", ["string"]),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value", [">= 0"]),
    ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value", ["300", "299"]),
    ({"min_tokens": -1}, "min_tokens", "invalid_value", [">= 0"]),
    ({"deadline_ms": 0}, "deadline_ms", "invalid_value", [">= 1"]),
    ({"deadline_ms": 1.5}, "deadline_ms", "invalid_type", ["1.5", "integer"]),
    ({"on_worker_loss": "retry"}, "on_worker_loss", "invalid_value", ["recompute", "fail"]),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "invalid_value", ["9", "8"]),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type", ["1", "boolean"]),
    ({"stream": "yes"}, "stream", "invalid_type", ["boolean"]),
    ({"stream_options": {}}, "stream_options", "invalid_value", ["stream=true"]),
    (
        {"stream": True, "stream_options": {"include_usages": True}},
        "stream_options.include_usages",
        "unknown_parameter",
        ["include_usages"],
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
        ["false"],
    ),
    ({"max_token": 3}, "max_token", "unknown_parameter", ["max_tokens"]),
    ({"guided_json": {}}, "guided_json", "unknown_parameter", ["guided_json"]),
    ({"n": 0}, "n", "invalid_value", ["0", ">= 1"]),
    ({"n": 65}, "n", "invalid_value", ["65", "<= 64"]),
    ({"n": True}, "n", "invalid_type", ["true", "integer"]),
    ({"top_p": 1.1}, "top_p", "invalid_value", ["1.1", "<= 1"]),
    ({"top_p": "0.5"}, "top_p", "invalid_type", ["0.5", "number"]),
    ({"top_k": -2}, "top_k", "invalid_value", ["-2", ">= -1"]),
    ({"top_k": 1.5}, "top_k", "invalid_type", ["1.5", "integer"]),
    ({"min_p": -0.1}, "min_p", "invalid_value", ["-0.1", ">= 0"]),
    ({"typical_p": 2}, "typical_p", "invalid_value", ["2", "<= 1"]),
    ({"presence_penalty": 2.1}, "presence_penalty", "invalid_value", ["2.1", "<= 2"]),
    ({"frequency_penalty": -3}, "frequency_penalty", "invalid_value", ["-3", ">= -2"]),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value", ["0", ">= 0.01"]),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value", ["x", "299"]),
    ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_value", ["300", "299"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value", ["-1", "299"]),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value", ["999", "299"]),
    ({"logit_bias": {"01": 1, "1": 2}}, "logit_bias", "invalid_value", ['"01"', "299"]),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value", ["101", "-100 to 100"]),
    ({"logit_bias": {"1": "2"}}, "logit_bias", "invalid_type", ["number"]),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type", ["object"]),
    (
        {"logit_bias": {str(i): 0 for i in range(1025)}},
        "logit_bias",
        "invalid_value",
        ["<= 1024"],
    ),
    ({"user": 5}, "user", "unsupported_parameter", ["a string"]),
    ({"metadata": {"a": 1}}, "metadata", "unsupported_parameter", ["strings"]),
]

ONLY_CHAT = [
    ({"messages": ...}, "messages", "missing_required_parameter", ["messages"]),
    ({"messages": []}, "messages", "invalid_value", [">= 1"]),
    ({"messages": "Hi"}, "messages", "invalid_type", ["array"]),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter", []),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", []),
    (
        {"messages": [USER, {"role": "tool", "content": "x"}]},
        "messages[1].role",
        "invalid_value",
        ["tool", "system", "user", "assistant"],
    ),
    (
        {"messages": [{"role": "x - at `$.model`", "content": ""}]},
        "messages[0].role",
        "invalid_value",
        ["assistant"],
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type", ["5"]),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages[0].content[0].type",
        "invalid_value",
        ["image_url", '"text"'],
    ),
    ({"messages": [USER | {"name": "Ann"}]}, "messages[0].name", "invalid_type", ["null"]),
    ({"messages": [USER | {"mood": "bad"}]}, "messages[0].mood", "unknown_parameter", ["mood"]),
    (
        {"messages": [{"role": "assistant", "content": "x"}]},
        "messages",
        "invalid_value",
        ["starts with system or user"],
    ),
    (
        {"messages": [{"role": "user", "content": "x" * 600}]},
        "messages",
        "context_length_exceeded",
        ["512", "511"],
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value", [">= 1"]),
    ({"max_completion_tokens": 600}, "max_completion_tokens", "context_length_exceeded", ["512"]),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value", ["one of"]),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter", ["[]"]),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter", ["none"]),
    ({"logprobs": 5}, "logprobs", "invalid_type", ["5", "boolean"]),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value", ["2", "logprobs=true"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", ["21", "<= 20"]),
    ({"echo": True}, "echo", "unknown_parameter", ["echo"]),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", []),
    ({"store": True}, "store", "unsupported_parameter", ["false"]),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter", ["high"]),
    ({"prompt": "x"}, "prompt", "unknown_parameter", ["prompt"]),
]

ONLY_PLAIN = [
    ({"prompt": ...}, "prompt", "missing_required_parameter", ["prompt"]),
    ({"prompt": ""}, "prompt", "invalid_value", ["at least one"]),
    ({"prompt": []}, "prompt", "invalid_value", [">= 1"]),
    ({"prompt": [[]]}, "prompt[0]", "invalid_value", [">= 1"]),
    ({"prompt": 5}, "prompt", "invalid_type", ["5"]),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type", ["mixes"]),
    ({"prompt": [1, None]}, "prompt[1]", "invalid_type", ["null"]),
    ({"prompt": [1, 300]}, "prompt", "invalid_value", ["300", "299"]),
    ({"prompt": [[1], [10**25]]}, "prompt", "invalid_value", ["299"]),
    ({"prompt": ["a"] * 65}, "prompt", "invalid_value", ["65", "64"]),
    ({"prompt": "x" * 512}, "prompt", "context_length_exceeded", ["512", "511"]),
    ({"prompt": ["x", "x" * 512]}, "prompt", "context_length_exceeded", ["511"]),
    ({"echo": 1}, "echo", "invalid_type", ["1", "boolean"]),
    ({"best_of": 3}, "best_of", "unsupported_parameter", ["3"]),
    ({"best_of": 1, "n": 2}, "best_of", "unsupported_parameter", ["1", "2"]),
    ({"prompt": ["a"] * 22, "n": 3}, "n", "invalid_value", ["3", "22", "64"]),
    ({"suffix": "x"}, "suffix", "unsupported_parameter", ["x"]),
    ({"logprobs": True}, "logprobs", "invalid_type", ["true", "integer"]),
    ({"logprobs": 21}, "logprobs", "invalid_value", ["21", "<= 20"]),
    ({"top_logprobs": 1}, "top_logprobs", "unknown_parameter", ["top_logprobs"]),
    ({"messages": [USER]}, "messages", "unknown_parameter", ["messages"]),
]

CASES = (
    [(path, *case) for case in BOTH for path in (CHAT, PLAIN)]
    + [(CHAT, *case) for case in ONLY_CHAT]
    + [(PLAIN, *case) for case in ONLY_PLAIN]
)


@pytest.mark.parametrize(("path", "fields", "param", "code", "words"), CASES)
def test_refused_by_name(
    server: Served, path: str, fields: dict[str, Any], param: str, code: str, words: list[str]
) -> None:
    asked = len(server.node.asked)
    answer = send(server, path, fields)
    assert answer.status == 400
    error = answer.error
    assert (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "invalid_request_error"
    assert param.partition("[")[0] in error["message"]
    for word in words:
        assert word in error["message"], error
    assert len(server.node.asked) == asked, "it reached the node"


HARMLESS_CHAT: dict[str, Any] = {
    "n": 1,
    "top_p": 1.0,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "user": "ann",
    "metadata": {"run": "7"},
    "store": False,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "modalities": ["text"],
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "stream_options": None,
}


@pytest.mark.parametrize("name", HARMLESS_CHAT)
def test_a_default_spelt_out_is_accepted(server: Served, name: str) -> None:
    assert send(server, CHAT, {name: HARMLESS_CHAT[name]}).status == 200
    assert send(server, CHAT, {name: None}).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1, "echo": False, "suffix": "", "logprobs": None, "n": 1, "top_p": 1},
        {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0},
        {"top_p": 0, "typical_p": 0, "presence_penalty": -2, "frequency_penalty": 2},
        {"best_of": 2, "n": 2},
        {"n": 64},
        {"deadline_ms": 86_400_000, "on_worker_loss": "fail"},
        {"deadline_ms": None, "on_worker_loss": None},
        {"logit_bias": {"0": 100, "299": -100}},
        {"temperature": 2},
        {"temperature": None, "max_tokens": None, "seed": None, "stop": None, "stream": None},
        {"stop": ["a", "b", "c", "d"]},
        {"stop": []},
        {"prompt": "x" * 511},
        {"prompt": "x" * 500, "max_tokens": 12},
        {"prompt": ["a"] * 64},
    ],
)
def test_the_edge_is_accepted(server: Served, fields: dict[str, Any]) -> None:
    assert send(server, PLAIN, fields).status == 200


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_unknown_model(server: Served, path: str) -> None:
    answer = send(server, path, {"model": "gpt-4o"})
    assert answer.status == 404
    error = answer.error
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-4o" in error["message"] and MODEL in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"model": "m",}',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_bad_json(server: Served, path: str, body: bytes) -> None:
    answer = server.ask("POST", path, body)
    assert answer.status == 400
    assert answer.error["code"] == "invalid_json"
    assert "JSON" in answer.error["message"]


@pytest.mark.parametrize("body", [b"[]", b"3", b'"x"', b"null"])
def test_json_of_another_kind(server: Served, body: bytes) -> None:
    answer = server.ask("POST", CHAT, body)
    assert answer.status == 400
    assert "JSON object" in answer.error["message"]


def test_deep_values_are_refused_not_recursed_into(server: Served) -> None:
    deep = b"[" * 900 + b"]" * 900
    answer = server.ask("POST", CHAT, b'{"model": "m", "tools": ' + deep + b"}")
    assert answer.status == 400
    assert answer.error["param"] == "tools"


def test_unknown_routes_and_methods(server: Served) -> None:
    for path in ("/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/../etc/passwd"):
        answer = server.ask("GET", path)
        assert answer.status == 404
        assert answer.error["code"] == "unknown_route"
    answer = server.ask("GET", CHAT)
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert answer.error["code"] == "method_not_allowed"
    assert server.ask("DELETE", "/metrics").error["code"] == "method_not_allowed"


def test_other_media_types(server: Served) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = server.ask("POST", CHAT, b"{}", form)
    assert answer.status == 415
    assert "application/json" in answer.error["message"]
    answer = server.ask("POST", CHAT, b"{}", {"Content-Encoding": "gzip"})
    assert answer.status == 415
    assert answer.error["param"] == "Content-Encoding"
    utf8 = {"Content-Type": "application/json; charset=utf-8"}
    assert server.ask("POST", CHAT, chat_body(), utf8).status == 200


@pytest.mark.parametrize("header", [b"Content-Encoding: \xff", b"Expect: \xff"])
def test_a_header_that_is_no_utf8_is_refused_like_any_other(server: Served, header: bytes) -> None:
    head, body = post(CHAT, chat_body()).split(b"\r\n\r\n", 1)
    with server.raw(head + b"\r\n" + header + b"\r\n\r\n" + body) as sock:
        answer = sock.recv(65536)
    assert answer.split(b" ", 2)[1] in (b"415", b"417"), answer
