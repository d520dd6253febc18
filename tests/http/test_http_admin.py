"""/admin/state and /admin/events."""

import json
import time
from typing import Any

import pytest

from blitzd.http import Limits
from tests.http.scripted_node import ScriptedNode
from tests.http.served import eventually, served


def record(seq: int) -> dict[str, Any]:
    return {
        "seq": seq,
        "wall_ns": 1,
        "mono_ns": 1,
        "kind": "event",
        "type": "ReplicaChanged",
        "cause": seq - 1,
        "payload": ["é"],
    }


def node_with(count: int) -> ScriptedNode:
    return ScriptedNode(records=[record(seq) for seq in range(1, count + 1)])


def lines(body: bytes) -> list[Any]:
    assert body == b"" or body.endswith(b"\n")
    return [json.loads(line) for line in body.splitlines()]


def test_state_is_the_folded_state() -> None:
    node = ScriptedNode()
    with served(node) as server:
        answer = server.ask("GET", "/admin/state", admin=True)
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.json == node.state()


@pytest.mark.parametrize(
    ("query", "seqs"),
    [
        ("", range(1, 1001)),
        ("?since=1190", range(1191, 1201)),
        ("?since=1200", []),
        ("?since=99999", []),
        ("?limit=2", [1, 2]),
        ("?since=5&limit=3&follow=false", [6, 7, 8]),
        ("?since=5&limit=3&follow=true", [6, 7, 8]),
        ("?limit=1200", range(1, 1201)),
    ],
)
def test_events_are_json_lines(query: str, seqs: Any) -> None:
    with served(node_with(1200)) as server:
        answer = server.ask("GET", f"/admin/events{query}", admin=True)
    assert answer.headers["Content-Type"] == "application/jsonl"
    assert lines(answer.body) == [record(seq) for seq in seqs]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("since=-1", "since"),
        ("since=x", "since"),
        ("since=", "since"),
        ("since=" + "9" * 30, "since"),
        ("since=²", "since"),
        ("limit=0", "limit"),
        ("limit=100001", "limit"),
        ("limit=1.5", "limit"),
        ("follow=maybe", "follow"),
        ("before=3", "before"),
    ],
)
def test_bad_queries_are_refused_by_name(query: str, param: str) -> None:
    with served(node_with(3)) as server:
        answer = server.ask("GET", f"/admin/events?{query}".replace("²", "%C2%B2"), admin=True)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert "accepted" in answer.error["message"]


FOLLOW = b"GET /admin/events?follow=1&since=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_following_sends_what_is_appended_and_ends_with_the_client() -> None:
    node = node_with(2)
    with served(node) as server:
        sock = server.raw(FOLLOW, admin=True)
        received = b""
        while b'"seq":2' not in received:
            received += sock.recv(65536)

        def append() -> None:
            node.records.append(record(3))
            node.new_record.set()

        server.call(append)
        while b'"seq":3' not in received:
            received += sock.recv(65536)
        assert b'"seq":1,' not in received
        assert node.followers == 1
        sock.close()
        eventually(lambda: node.followers == 0, within_s=1.0)


def test_following_gets_its_headers_before_the_first_record() -> None:
    with served(ScriptedNode()) as server:
        sock = server.raw(FOLLOW, admin=True)
        assert b"200 OK" in sock.recv(65536)
        sock.close()


def test_shutdown_ends_followers_in_good_order() -> None:
    node = node_with(2)
    with served(node, Limits(shutdown_s=20.0)) as server:
        sock = server.raw(FOLLOW, admin=True)
        eventually(lambda: node.followers == 1)
        started = time.monotonic()
    assert time.monotonic() - started < 2.0
    assert node.followers == 0
    received = b""
    while data := sock.recv(65536):
        received += data
    sock.close()
    assert received.endswith(b"0\r\n\r\n")


def test_a_log_that_cannot_be_read_is_told_in_the_stream() -> None:
    node = node_with(2)
    node.events_fail = TimeoutError("disk")
    with served(node) as server:
        found = lines(server.ask("GET", "/admin/events", admin=True).body)
    assert [r["seq"] for r in found[:2]] == [1, 2]
    assert found[2]["error"]["code"] == "internal_error"


def test_admin_errors_are_error_objects() -> None:
    with served(ScriptedNode()) as server:
        assert server.ask("GET", "/v1/models", admin=True).error["code"] == "unknown_route"
        assert server.ask("POST", "/admin/state", {}, admin=True).status == 405
