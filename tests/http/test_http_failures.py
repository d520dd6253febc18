"""When the node refuses or fails: the client is told what happened, in the right place."""

import pytest

from blitzd.http import Limits
from blitzd.node.face import Delta, GenerateRequest, GenerationFailed, RequestRefused
from tests.http.scripted_node import FOREVER, MODEL, Pause, Script, ScriptedNode, say
from tests.http.served import Served, frames, served

DIED = GenerationFailed("decode replica d0 died", code="replica_lost")


def refusing(status: int, code: str) -> ScriptedNode:
    refusal = RequestRefused("no: because", status=status, code=code, retry_after_s=7)
    return ScriptedNode(refuse=lambda request: refusal)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(429, "queue_full", "rate_limit_error"), (503, "draining", "server_error")],
)
def test_a_refusal_keeps_its_status(status: int, code: str, kind: str, stream: bool) -> None:
    with served(refusing(status, code)) as server:
        answer = server.chat(stream=stream)
    assert answer.status == status
    assert answer.headers["Retry-After"] == "7"
    assert answer.error == {"message": "no: because", "type": kind, "param": None, "code": code}


def test_a_refused_prompt_frees_the_others() -> None:
    def second_is_refused(request: GenerateRequest) -> Exception | None:
        if request.prompt_tokens == (98,):
            return RequestRefused("queue is full", status=429, code="queue_full")
        return None

    node = ScriptedNode([FOREVER], refuse=second_is_refused)
    with served(node) as server:
        assert server.complete(prompt=["a", "b", "c"]).status == 429
    assert node.open == {}
    assert node.ends["cancelled"] == 1
    assert len(node.asked) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_any_text_is_a_503(stream: bool) -> None:
    with served(ScriptedNode([Delta("", (1,)), DIED])) as server:
        answer = server.chat(stream=stream)
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"
    assert answer.error["code"] == "replica_lost"
    assert "decode replica d0 died" in answer.error["message"]


def last_frames(server: Served) -> None:
    for body in (server.chat(stream=True).body, server.complete(stream=True).body):
        *chunks, last = frames(body)
        assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
        assert set(last) == {"error"}
        assert last["error"]["code"] == "replica_lost"
        assert last["error"]["type"] == "server_error"
        assert "decode replica d0 died" in last["error"]["message"]


def test_a_failure_in_mid_stream_is_the_last_frame() -> None:
    node = ScriptedNode([*say("a", "b", finish=None), DIED])
    with served(node) as server:
        last_frames(server)
    assert node.ends["failed"] == 2


def test_a_failure_in_the_middle_of_a_whole_answer_is_a_503() -> None:
    with served(ScriptedNode([*say("a", finish=None), DIED])) as server:
        assert server.complete().error["code"] == "replica_lost"


def test_one_failed_choice_ends_the_others() -> None:
    def script(request: GenerateRequest) -> Script:
        return [DIED] if request.prompt_tokens == (98,) else [*say("a", finish=None), FOREVER]

    node = ScriptedNode(script)
    with served(node) as server:
        assert server.complete(prompt=["a", "b", "c"]).status == 503
    assert node.open == {}
    assert node.ends["cancelled"] == 2


@pytest.mark.parametrize("script", [[], say("a", "b", finish=None)])
def test_an_end_without_a_reason_is_a_failure(script: Script) -> None:
    with served(ScriptedNode(script)) as server:
        assert server.chat().error["code"] == "incomplete"
        stream = server.chat(stream=True)
    if script:
        assert frames(stream.body)[-1]["error"]["code"] == "incomplete"
    else:
        assert stream.status == 503


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_stalled_generation_is_ended(prompt: object) -> None:
    node = ScriptedNode([*say("a", finish=None), FOREVER])
    with served(node, Limits(stall_s=0.2, shutdown_s=2.0)) as server:
        answer = server.complete(prompt=prompt)
    assert answer.status == 503
    assert answer.error["code"] == "generation_stalled"
    assert node.open == {}


def test_a_stream_with_a_long_pause_says_that_it_is_alive() -> None:
    """A request that waits for its worker's successor is not cut off by what lies between."""
    node = ScriptedNode([*say("a", finish=None), Pause(0.5), *say("b")])
    with served(node, Limits(keepalive_s=0.1, shutdown_s=2.0)) as server:
        stream = server.complete(stream=True)
        whole = server.complete()
    comment = b": still here\n\n"
    assert 2 <= stream.body.count(comment) <= 5
    events = frames(stream.body.replace(comment, b""))
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "ab"
    assert whole.json["choices"][0]["text"] == "ab"


def test_before_the_first_text_nothing_is_sent_however_long_it_takes() -> None:
    late = GenerationFailed("still queued after 400 ms", code="deadline")
    with served(ScriptedNode([Pause(0.4), late]), Limits(keepalive_s=0.1)) as server:
        answer = server.chat(stream=True)
    assert (answer.status, answer.error["code"]) == (503, "deadline")
    assert int(answer.headers["Retry-After"]) >= 1


def test_an_acceptance_that_stalls_is_ended() -> None:
    node = ScriptedNode(accept_s=0.5)
    with served(node, Limits(stall_s=0.1, release_s=2.0, shutdown_s=2.0)) as server:
        assert server.chat().error["code"] == "generation_stalled"
    # It was accepted after all, and given back.
    assert (node.made, node.open, node.ends["cancelled"]) == (1, {}, 1)


def test_a_defect_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    secret = RuntimeError("secret path")
    with served(ScriptedNode(refuse=lambda request: secret)) as server:
        answer = server.chat()
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"
    assert b"secret" not in answer.body
    assert "secret path" in caplog.text


def test_a_connection_error_of_the_node_is_not_taken_for_a_client_that_left() -> None:
    with served(ScriptedNode(refuse=lambda request: ConnectionRefusedError("gRPC"))) as server:
        assert server.chat().status == 500


def test_the_models_name_in_answers_is_the_one_asked_for() -> None:
    with served(ScriptedNode()) as server:
        assert server.chat().json["model"] == MODEL
