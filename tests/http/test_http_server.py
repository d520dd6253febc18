"""Sockets, limits, request ids, probes, shutdown."""

import asyncio
import json
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from blitzd.http import Limits, serve
from blitzd.node.face import Health
from tests.http.scripted_node import FOREVER, MODEL, ByteTokenizer, Pause, ScriptedNode, say
from tests.http.served import Served, chat_body, eventually, frames, post, served

CHAT = "/v1/chat/completions"


def test_request_ids_are_echoed_or_made() -> None:
    with served(ScriptedNode()) as server:
        mine = {"X-Request-Id": "my-id/1"}
        for path in ("/live", "/nope", "/v1/models"):
            assert server.ask("GET", path, headers=mine).headers["X-Request-Id"] == "my-id/1"
        stream = server.ask("POST", CHAT, chat_body(stream=True), mine)
        assert stream.headers["X-Request-Id"] == "my-id/1"
        made = {server.ask("GET", "/live").headers["X-Request-Id"] for _ in range(3)}
        assert len(made) == 3 and all(made)


@pytest.mark.parametrize("bad", ["", "a b", "é", "x" * 129, "\t"])
def test_unusable_request_ids_are_refused(bad: str) -> None:
    with served(ScriptedNode()) as server:
        answer = server.ask("GET", "/live", headers={"X-Request-Id": bad})
    assert answer.status == 400
    assert answer.error["param"] == "X-Request-Id"
    assert answer.headers["X-Request-Id"] not in ("", bad)


def test_bodies_have_a_limit() -> None:
    node = ScriptedNode()
    with served(node, Limits(body_bytes=1000, shutdown_s=2.0)) as server:
        big = chat_body(messages=[{"role": "user", "content": "x" * 2000}])
        answer = server.ask("POST", CHAT, big)
        assert answer.status == 413
        assert answer.error["code"] == "request_too_large"
        assert "1000" in answer.error["message"]
        # The same without a length that gives it away.
        chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        sock = server.raw(head + chunk * 2 + b"0\r\n\r\n")
        assert b" 413 " in sock.recv(65536)
        sock.close()
    assert node.asked == []


HOST = b"Host: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
NOT_HTTP = [
    (b"garbage\r\n\r\n", 400, "method"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, 400, "HTTPS"),
    (b"GET /live HTTP/9.9\r\n" + HOST + b"\r\n", 400, "version"),
    (b"GET /live HTTP/1.1\r\n\r\n", 400, "Host"),
    (b"GET /live HTTP/1.1\r\n" + HOST + b"X: " + b"y" * 10_000 + b"\r\n\r\n", 400, "8190"),
    (b"GET /" + b"y" * 10_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 400, "8190"),
    (b"GET /live HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 300 + b"\r\n", 400, "headers"),
    (POST + b"Content-Length: x\r\n\r\n", 400, "Content-Length"),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "chunk"),
    (POST + b"Expect: miracles\r\nContent-Length: 0\r\n\r\n", 417, "100-continue"),
]


@pytest.mark.parametrize(
    ("data", "status", "word"), NOT_HTTP, ids=[f"{row[2]}-{i}" for i, row in enumerate(NOT_HTTP)]
)
def test_what_is_not_http_gets_an_error_object(data: bytes, status: int, word: str) -> None:
    with served(ScriptedNode()) as server:
        sock = server.raw(data)
        answer = b""
        while b"}}" not in answer:
            received = sock.recv(65536)
            assert received, answer
            answer += received
        sock.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) == status
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert word.lower() in error["message"].lower()
    assert b"aiohttp" not in head


def test_a_client_may_ask_before_it_sends_its_body() -> None:
    """curl does for bodies above a megabyte."""
    with served(ScriptedNode()) as server:
        head, _, body = post(CHAT, chat_body()).partition(b"\r\n\r\n")
        sock = server.raw(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert b" 200 OK" in sock.recv(65536).splitlines()[0]
        sock.close()


def test_http_1_0_gets_a_stream_that_ends_with_the_connection() -> None:
    with served(ScriptedNode()) as server:
        request = post(CHAT, chat_body(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
        sock = server.raw(request)
        answer = b""
        while received := sock.recv(65536):
            answer += received
        sock.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert frames(body)[-1] == "[DONE]"


def test_a_body_too_long_is_refused_before_it_is_sent() -> None:
    with served(ScriptedNode()) as server:
        sock = server.raw(POST + b"Content-Length: 99999999999\r\n\r\n")
        assert b" 413 " in sock.recv(65536).splitlines()[0]
        sock.close()


PROBES = [
    (Health(live=True, ready=True, draining=False), "ready", (200, 200, 200)),
    (Health(True, False, False, ("no decode replica",)), "not ready", (200, 503, 200)),
    (Health(True, False, True, ("draining",)), "draining", (200, 503, 503)),
    (Health(True, True, True), "draining", (200, 503, 503)),
    (Health(False, False, False, ("the driver stands still",)), "stuck", (503, 503, 503)),
]


@pytest.mark.parametrize(("health", "word", "statuses"), PROBES)
def test_probes(health: Health, word: str, statuses: tuple[int, int, int]) -> None:
    with served(ScriptedNode(state_now=health)) as server:
        answers = [server.ask("GET", path) for path in ("/live", "/ready", "/health")]
    assert tuple(answer.status for answer in answers) == statuses
    for answer in answers:
        assert answer.json == {
            "status": word,
            "live": health.live,
            "ready": health.ready,
            "draining": health.draining,
            "reasons": list(health.reasons),
        }


def test_shutdown_lets_requests_end() -> None:
    node = ScriptedNode([*say("a", finish=None), Pause(0.5), *say("b")])
    answers: list[bytes] = []

    def ask(server: Served) -> None:
        answers.append(server.chat(stream=True).body)

    with served(node, Limits(shutdown_s=6.0)) as server:
        thread = threading.Thread(target=ask, args=(server,))
        thread.start()
        eventually(lambda: "decoding" in node.open.values())
    thread.join(5.0)
    assert frames(answers[0])[-1] == "[DONE]"
    assert node.ends["finished"] == 1


def test_shutdown_is_bounded_and_frees_everything() -> None:
    node = ScriptedNode([*say("a", finish=None), FOREVER], records=[])
    with served(node, Limits(shutdown_s=1.0)) as server:
        socks = [server.raw(post(CHAT, chat_body(stream=s))) for s in (True, False)]
        eventually(lambda: len(node.open) == 2)
        started = time.monotonic()
    assert time.monotonic() - started < 3.0
    assert node.open == {}
    assert node.ends["cancelled"] == 2
    for sock in socks:
        sock.close()


def test_idle_connections_do_not_hold_up_a_shutdown() -> None:
    with served(ScriptedNode(), Limits(shutdown_s=10.0)) as server:
        sock = server.raw(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in sock.recv(65536)
        started = time.monotonic()
    assert time.monotonic() - started < 1.0
    assert sock.recv(10) == b""
    sock.close()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def start() -> None:
            async with serve(ScriptedNode(), host="127.0.0.1", port=port, admin_port=0):
                raise AssertionError("it started")

        with pytest.raises(OSError, match=str(port)):
            asyncio.run(start())


def test_the_admin_socket(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # as a killed daemon leaves it
    with served(ScriptedNode(), admin_socket=path) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5.0)
            sock.connect(str(path))
            sock.sendall(b"GET /admin/state HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in sock.recv(65536)
        with (
            pytest.raises(OSError, match="another process"),
            served(ScriptedNode(), admin_socket=path),
        ):
            pass
        assert server.ask("GET", "/admin/state", admin=True).status == 200
    assert not path.exists()


def test_the_admin_socket_replaces_no_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(OSError, match="not a socket"), served(ScriptedNode(), admin_socket=path):
        pass
    assert path.read_text() == "mine"


def test_a_long_prompt_does_not_hold_up_the_others() -> None:
    class Slow(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            time.sleep(0.5)
            return super().encode(text)

    class SlowNode(ScriptedNode):
        def tokenizer(self, model: str) -> ByteTokenizer:
            return Slow()

    with served(SlowNode()) as server:
        body = {"model": MODEL, "prompt": "x" * 50_000}
        sock = server.raw(post("/v1/completions", body))
        time.sleep(0.1)
        started = time.monotonic()
        assert server.ask("GET", "/live").status == 200
        assert time.monotonic() - started < 0.3
        assert b"context_length_exceeded" in sock.recv(65536)
        sock.close()


def test_the_public_port_has_no_admin_routes() -> None:
    with served(ScriptedNode()) as server:
        assert server.ask("GET", "/admin/state").status == 404
        assert server.ask("GET", "/admin/events").status == 404
