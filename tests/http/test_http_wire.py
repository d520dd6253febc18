"""What goes over the wire: every shape of answer, whole and streamed."""

import time
from typing import Any

import pytest

from blitzd.node.face import Delta, GenerateRequest
from tests.http.scripted_node import MODEL, Pause, Script, ScriptedNode, say
from tests.http.served import chat_body, frames, post, served

USAGE = {"include_usage": True}


def counted(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_chat_answers_with_message_usage_and_reason() -> None:
    with served(ScriptedNode()) as server:
        before = int(time.time())
        answer = server.chat()
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("application/json")
    body = answer.json
    assert body.pop("created") in (before, before + 1)
    assert body == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": "fp_0123456789ab",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Paris.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len("<user>Hi\n<assistant>"),
            "completion_tokens": 3,
            "total_tokens": len("<user>Hi\n<assistant>") + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_completion_answers_with_text_usage_and_reason() -> None:
    with served(ScriptedNode(say("a", "b", finish="length"))) as server:
        body = server.complete(prompt="four").json
    assert body["object"] == "text_completion"
    assert body["id"] == "cmpl-1"
    assert body["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == counted(4, 2)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_chat_stream_shape(finish: str, usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": USAGE} if usage else {}
    with served(ScriptedNode(say("Par", "is", finish=finish))) as server:
        answer = server.chat(stream=True, **options)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *chunks, done = frames(answer.body)
    assert done == "[DONE]"
    last = chunks.pop() if usage else None
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "Par"}, None),
        ({"content": "is"}, None),
        ({}, finish),
    ]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert "finish_reason" in chunk["choices"][0]
        assert chunk["choices"][0]["index"] == 0
        assert ("usage" in chunk) == usage
        assert chunk.get("usage") is None
    if last is not None:
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 2
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 2
    ids = {(c["id"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}
    assert len(ids) == 1


@pytest.mark.parametrize("usage", [False, True])
def test_completion_stream_shape(usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": USAGE} if usage else {}
    with served(ScriptedNode(say("Par", "is", finish="length"))) as server:
        *chunks, done = frames(server.complete(stream=True, **options).body)
    assert done == "[DONE]"
    last = chunks.pop() if usage else None
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("Par", None),
        ("is", "length"),
    ]
    assert {c["object"] for c in chunks} == {"text_completion"}
    if last is not None:
        assert last["choices"] == []
        assert last["usage"] == counted(2, 2)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([Delta("", (2,), "stop")], id="end of sequence at once"),
        pytest.param([Delta("", (200,)), Delta("é", (201,)), Delta("", (2,), "stop")], id="é"),
        pytest.param([Delta("one", (1, 2, 3)), Delta("", (), "length")], id="end alone"),
        pytest.param([Delta("all of it", (1, 2), "stop")], id="one delta"),
        pytest.param(say(*"many small pieces", finish="length"), id="many"),
    ],
)
def test_streamed_and_whole_answers_agree(script: list[Delta]) -> None:
    text = "".join(delta.text for delta in script)
    tokens = sum(len(delta.token_ids) for delta in script)
    with served(ScriptedNode(script)) as server:
        whole = server.chat().json
        *chunks, usage, _ = frames(server.chat(stream=True, stream_options=USAGE).body)
        *pieces, _, _ = frames(server.complete(stream=True, stream_options=USAGE).body)
    assert whole["choices"][0]["message"]["content"] == text
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text
    assert "".join(c["choices"][0]["text"] for c in pieces) == text
    assert whole["usage"] == usage["usage"]
    assert usage["usage"]["completion_tokens"] == tokens
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(reasons) - 1) + [script[-1].finish]
    assert reasons[-1] == whole["choices"][0]["finish_reason"]


def test_text_that_splits_lines_stays_in_one_frame() -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne\x0bf\x1cg"
    with served(ScriptedNode([Delta(text, (1,), "stop")])) as server:
        body = server.complete(stream=True).body
    first, *_ = frames(body)
    assert first["choices"][0]["text"] == text
    lines = [line for line in body.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)


def test_the_role_does_not_come_before_the_first_text() -> None:
    script: Script = [Pause(0.2), Delta("", (5,)), Pause(0.2), *say("x")]
    with served(ScriptedNode(script)) as server:
        sock = server.raw(post("/v1/chat/completions", chat_body(stream=True)))
        started = time.monotonic()
        first = sock.recv(65536)
        assert time.monotonic() - started > 0.35
        assert b'"role":"assistant"' in first
        assert b'"content":"x"' in first
        sock.close()


def test_tokens_are_sent_as_they_come() -> None:
    with served(ScriptedNode([*say("a", finish=None), Pause(0.4), *say("b")])) as server:
        sock = server.raw(post("/v1/completions", {"model": MODEL, "prompt": "x", "stream": True}))
        first = sock.recv(65536)
        at_first = time.monotonic()
        assert b'"text":"a"' in first and b'"text":"b"' not in first
        rest = sock.recv(65536)
        assert time.monotonic() - at_first > 0.3
        assert b'"text":"b"' in rest
        sock.close()


def by_prompt(request: GenerateRequest) -> Script:
    """The prompt comes back, the first one last."""
    name = bytes(request.prompt_tokens).decode()
    return [Pause(0.1 if name == "a" else 0.0), *say(name, finish=None), *say("!")]


@pytest.mark.parametrize("prompt", [["a", "b", "c"], [[97], [98], [99]]])
def test_each_prompt_is_a_choice(prompt: list[Any]) -> None:
    with served(ScriptedNode(by_prompt)) as server:
        whole = server.complete(prompt=prompt).json
        *chunks, _ = frames(server.complete(prompt=prompt, stream=True).body)
    assert [(c["index"], c["text"]) for c in whole["choices"]] == [(0, "a!"), (1, "b!"), (2, "c!")]
    assert whole["usage"] == counted(3, 6)
    texts, ends = ["", "", ""], [0, 0, 0]
    for (choice,) in (c["choices"] for c in chunks):
        assert ends[choice["index"]] == 0, "text after the end of a choice"
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == ["a!", "b!", "c!"]
    assert ends == [1, 1, 1]
    assert chunks[0]["choices"][0]["index"] != 0, "a slow choice held up the others"


def test_a_prompt_may_be_token_ids() -> None:
    node = ScriptedNode()
    with served(node) as server:
        assert server.complete(prompt=[1, 2, 299]).status == 200
    assert node.asked[0].prompt_tokens == (1, 2, 299)


def test_parameters_reach_the_node() -> None:
    node = ScriptedNode()
    with served(node) as server:
        server.chat(
            max_completion_tokens=7,
            temperature=0,
            seed=-1,
            stop="END",
            stop_token_ids=[3, 4],
            ignore_eos=True,
            min_tokens=2,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            typical_p=0.8,
            presence_penalty=-0.5,
            frequency_penalty=1,
            repetition_penalty=1.1,
            logit_bias={"3": -100, "299": 1.5},
            logprobs=True,
            top_logprobs=4,
            deadline_ms=5000,
            on_worker_loss="fail",
        )
        server.chat(stop=["a", "b"], max_tokens=9, max_completion_tokens=9)
        server.chat()
        server.complete()
        server.complete(prompt="x" * 505)
    exact, both, chat, completion, long = node.asked
    assert exact == GenerateRequest(
        prompt_tokens=tuple(b"<user>Hi\n<assistant>"),
        max_tokens=7,
        temperature=0.0,
        seed=2**64 - 1,
        stop=("END",),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        min_tokens=2,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        typical_p=0.8,
        presence_penalty=-0.5,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias=((3, -100.0), (299, 1.5)),
        logprobs=4,
        model=MODEL,
        deadline_ms=5000,
        recompute=False,
    )
    assert (both.stop, both.max_tokens) == (("a", "b"), 9)
    # OpenAI's defaults: the rest of the context for chat, 16 for plain completions.
    assert chat.max_tokens == 512 - len(chat.prompt_tokens)
    assert (chat.temperature, chat.seed, chat.stop) == (1.0, None, ())
    assert completion == GenerateRequest(tuple(b"Hi"), max_tokens=16, temperature=1.0, model=MODEL)
    assert long.max_tokens == 7


def test_text_parts_are_joined() -> None:
    node = ScriptedNode()
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    with served(node) as server:
        server.chat(messages=[{"role": "system", "content": parts}])
    assert node.asked[0].prompt_tokens == tuple(b"<system>Hello\n<assistant>")


def test_an_answer_can_be_sent_back_as_history() -> None:
    with served(ScriptedNode()) as server:
        said = server.chat().json["choices"][0]["message"]
        user = {"role": "user", "content": "Hi"}
        assert server.chat(messages=[user, said, user]).status == 200


def test_long_prompts_are_tokenised_too() -> None:
    with served(ScriptedNode()) as server:
        error = server.complete(prompt="x" * 100_000).error
    assert error["code"] == "context_length_exceeded"
    assert "100000" in error["message"]


def test_models() -> None:
    with served(ScriptedNode()) as server:
        listed = server.ask("GET", "/v1/models").json
        one = server.ask("GET", f"/v1/models/{MODEL}").json
        missing = server.ask("GET", "/v1/models/nope")
    assert listed == {"object": "list", "data": [one]}
    assert one["id"] == MODEL
    assert one["object"] == "model"
    assert one["created"] == 1_700_000_000
    assert one["owned_by"] == "blitzd"
    assert one["context_window"] == 512
    assert missing.status == 404
    assert missing.error["code"] == "model_not_found"
    assert MODEL in missing.error["message"]
