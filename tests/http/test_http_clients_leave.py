"""Clients that leave, do not read, or do not write: what they held is freed, always."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from blitzd.http import Limits
from blitzd.node.face import Delta
from tests.http.scripted_node import FOREVER, MODEL, Pause, Script, ScriptedNode, say
from tests.http.served import Served, chat_body, eventually, post, served

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"


def leave_before_acceptance(server: Served, sock: socket.socket) -> None:
    eventually(lambda: len(server.node.asked) == 1)


def leave_while_queued(server: Served, sock: socket.socket) -> None:
    eventually(lambda: "queued" in server.node.open.values())


def leave_while_decoding(server: Served, sock: socket.socket) -> None:
    eventually(lambda: "decoding" in server.node.open.values())


PHASES: list[tuple[Callable[[Served, socket.socket], None], float, Script]] = [
    (leave_before_acceptance, 0.3, [FOREVER]),
    (leave_while_queued, 0.0, [FOREVER]),
    (leave_while_decoding, 0.0, [*say("a", finish=None), FOREVER]),
    (
        leave_while_decoding,
        0.0,
        [step for _ in range(1000) for step in (say("a", finish=None)[0], Pause(0.01))],
    ),
]


@pytest.mark.parametrize("abort", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("reach", "accept_s", "script"), PHASES)
def test_leaving_cancels(
    reach: Callable[[Served, socket.socket], None],
    accept_s: float,
    script: Script,
    stream: bool,
    abort: bool,
) -> None:
    node = ScriptedNode(script, accept_s=accept_s)
    with served(node) as server:
        sock = server.raw(post(CHAT, chat_body(stream=stream)))
        reach(server, sock)
        if abort:
            linger_off = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_off)
        sock.close()
        eventually(lambda: node.ends["cancelled"] == 1, within_s=1.0)
        assert node.open == {}
        assert gauges(server) == {"open": 0, "ended": 1}


def gauges(server: Served) -> dict[str, float]:
    text = server.ask("GET", "/metrics").body.decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    return {
        "open": sum(s.value for s in families["blitzd_requests_open"].samples),
        "ended": sum(s.value for s in families["blitzd_requests"].samples),
    }


def test_leaving_cancels_every_choice() -> None:
    node = ScriptedNode(lambda request: [*say("a", finish=None), Pause(request.prompt_tokens[0])])
    with served(node) as server:
        body = {"model": MODEL, "prompt": ["p", "q", "r"], "stream": True}
        sock = server.raw(post(PLAIN, body))
        eventually(lambda: list(node.open.values()) == ["decoding"] * 3)
        sock.close()
        eventually(lambda: node.ends["cancelled"] == 3, within_s=1.0)


def test_leaving_stops_the_prompts_that_are_not_started() -> None:
    node = ScriptedNode([FOREVER], accept_s=0.2)
    with served(node) as server:
        sock = server.raw(post(PLAIN, {"model": MODEL, "prompt": ["x"] * 10}))
        eventually(lambda: len(node.asked) == 2)
        sock.close()
        eventually(lambda: node.ends["cancelled"] == 2, within_s=1.0)
    assert len(node.asked) == 2
    assert node.open == {}


def test_many_that_leave_leave_no_trace() -> None:
    node = ScriptedNode([*say("a", finish=None), FOREVER])
    with served(node) as server:
        socks = [server.raw(post(CHAT, chat_body(stream=True))) for _ in range(50)]
        eventually(lambda: len(node.open) == 50)
        assert gauges(server)["open"] == 50
        for sock in socks:
            sock.close()
        eventually(lambda: node.ends["cancelled"] == 50)
        assert gauges(server) == {"open": 0, "ended": 50}


def rest_of(sock: socket.socket) -> bytes:
    """What still comes until the server closes, in either way."""
    received = bytearray()
    sock.settimeout(5.0)
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 20):
            received += data
    sock.close()
    return bytes(received)


def endless(node: ScriptedNode) -> Script:
    """More text than any buffer holds, each delta counted as it is taken."""

    def script() -> Script:
        class Steps(list[Delta]):
            def __iter__(self):  # type: ignore[no-untyped-def]
                while True:
                    node.seen.ttft_s.counts[0] += 1
                    yield Delta("x" * 1024, (1,))

        return Steps()

    return script()


def test_a_client_that_does_not_read_is_bounded_and_cancelled() -> None:
    node = ScriptedNode()
    node.script = endless(node)
    with served(node, Limits(send_s=0.5, shutdown_s=2.0)) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.where.port))
        sock.sendall(post(PLAIN, {"model": MODEL, "prompt": "x", "stream": True}))
        eventually(lambda: node.made == 1)
        time.sleep(0.25)
        taken = node.seen.ttft_s.counts[0]
        time.sleep(0.15)
        # Nothing is taken from the node while the client takes nothing from us. What is
        # under way sits in the kernel's send buffer (4 MiB at most) and in 64 KiB of ours.
        assert node.seen.ttft_s.counts[0] == taken
        assert taken < 6000
        eventually(lambda: node.ends["cancelled"] == 1, within_s=2.0)
        assert not rest_of(sock).endswith(b"0\r\n\r\n")


def test_a_client_that_reads_slowly_gets_everything() -> None:
    script = [*(Delta("x" * 1024, (1,)) for _ in range(3000)), Delta("", (), "stop")]
    with served(ScriptedNode(script), Limits(send_s=1.0, shutdown_s=2.0)) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.where.port))
        sock.sendall(post(PLAIN, {"model": MODEL, "prompt": "x", "stream": True}))
        received = bytearray()
        sock.settimeout(5.0)
        while not received.endswith(b"\r\n0\r\n\r\n"):
            data = sock.recv(32768)
            assert data, "cut off"
            received += data
            time.sleep(0.001)
        sock.close()
        assert b"data: [DONE]" in received[-60:]
        assert received.count(b'"text":"xxx') == 3000


def test_a_big_answer_that_nobody_reads_is_dropped() -> None:
    node = ScriptedNode([Delta("x" * 20_000_000, (1,), "stop")])
    with served(node, Limits(send_s=0.3, shutdown_s=2.0)) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.where.port))
        sock.sendall(post(PLAIN, {"model": MODEL, "prompt": "x"}))
        eventually(lambda: node.ends["finished"] == 1)
        time.sleep(0.6)
        assert len(rest_of(sock)) < 20_000_000


def test_an_answer_left_in_the_kernel_is_dropped() -> None:
    """The handler is long done, and the connection looks idle: only the kernel knows."""
    node = ScriptedNode([Delta("x" * 300_000, (1,), "stop")])
    with served(node, Limits(send_s=0.4, idle_s=60.0, shutdown_s=2.0)) as server:
        before = len(asyncio.all_tasks(server.loop))
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.where.port))
        sock.sendall(post(PLAIN, {"model": MODEL, "prompt": "x"}))
        eventually(lambda: node.ends["finished"] == 1)
        assert len(asyncio.all_tasks(server.loop)) > before
        eventually(lambda: len(asyncio.all_tasks(server.loop)) == before, within_s=4.0)
        sock.close()


def test_a_reader_of_the_unix_socket_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    node = ScriptedNode(records=[{"seq": n, "payload": "x" * 10_000} for n in range(1, 1001)])
    path = tmp_path / "admin.sock"
    with served(node, Limits(send_s=0.3, shutdown_s=2.0), admin_socket=path):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(path))
        sock.sendall(b"GET /admin/events?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        eventually(lambda: node.followers == 1)
        eventually(lambda: node.followers == 0, within_s=2.0)
        assert not rest_of(sock).endswith(b"0\r\n\r\n")


def test_a_body_that_does_not_come_is_a_408() -> None:
    node = ScriptedNode()
    with served(node, Limits(body_s=0.2, shutdown_s=2.0)) as server:
        head = post(CHAT, chat_body())
        sock = server.raw(head[:-10])
        answer = sock.recv(65536)
        assert b" 408 " in answer.splitlines()[0]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        sock.close()
    assert node.asked == []


def test_headers_that_do_not_come_end_the_connection() -> None:
    with served(ScriptedNode(), Limits(idle_s=0.2, shutdown_s=2.0)) as server:
        sock = server.raw(b"GET /live HTTP/1.1\r\nHost:")
        assert sock.recv(65536) == b""
        sock.close()


def test_a_connection_serves_one_request_after_another() -> None:
    with served(ScriptedNode()) as server:
        sock = server.raw(post(CHAT, chat_body()) * 3)
        received = b""
        while received.count(b'"finish_reason":"stop"') < 3:
            data = sock.recv(65536)
            assert data
            received += data
        sock.close()
    assert server.node.ends["finished"] == 3
