"""The operator's commands over HTTP: what is asked of the node, and what is refused."""

import http.client
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from blitzd.node.face import (
    ChangePolicy,
    CommandFailed,
    Deactivate,
    Drain,
    GoLive,
    Mutate,
    Release,
    Remove,
    Restart,
    Scale,
    StopRestarts,
    Undrain,
)
from tests.http.scripted_node import ScriptedNode
from tests.http.served import Answer, served

EVENT = {"seq": 9, "type": "ShutdownStarted", "payload": {"replica": "p0"}}


def post(node: ScriptedNode, path: str, body: Any = None, **headers: str) -> Answer:
    with served(node) as server:
        return server.ask("POST", path, {} if body is None else body, headers, admin=True)


@pytest.mark.parametrize(
    ("path", "body", "command"),
    [
        ("/admin/replicas/p0/drain", {}, Drain("p0")),
        ("/admin/replicas/p0/drain", b"", Drain("p0")),
        ("/admin/replicas/p0/drain", {"deadline_s": None}, Drain("p0")),
        ("/admin/replicas/p0/drain", {"deadline_s": 2.5}, Drain("p0", 2.5)),
        ("/admin/replicas/p0/drain", {"deadline_s": 0}, Drain("p0", 0.0)),
        ("/admin/replicas/p0/undrain", {}, Undrain("p0")),
        ("/admin/replicas/d0/restart", {"deadline_s": 30}, Restart("d0", 30.0)),
        ("/admin/restart", {}, Restart()),
        ("/admin/restart", {"deadline_s": 30}, Restart("", 30.0)),
        ("/admin/restart", {"stop": True}, StopRestarts()),
        ("/admin/replicas/p0/mutate", {"role": "decode"}, Mutate("p0", "decode")),
        ("/admin/replicas/p0/deactivate", {}, Deactivate("p0")),
        ("/admin/replicas/d0/live", {"old": "p0"}, GoLive("d0", "p0")),
        ("/admin/scale", {"prefill": 1, "decode": 3}, Scale(1, 3)),
        ("/admin/scale", {"remove": "d0"}, Remove("d0")),
        ("/admin/scale", {"auto": True}, Release()),
        ("/admin/policy", {"drain_ms": 5000}, ChangePolicy((("drain_ms", 5000),))),
        ("/admin/policy", {"preset": "impl_rdma"}, ChangePolicy((), "impl_rdma")),
        (
            "/admin/policy",
            {"preset": "motiv", "drain_ms": 5000},
            ChangePolicy((("drain_ms", 5000),), "motiv"),
        ),
    ],
)
def test_a_command_reaches_the_node_and_its_events_come_back(
    path: str, body: Any, command: object
) -> None:
    node = ScriptedNode(decides=lambda command: [EVENT])
    answer = post(node, path, body)
    assert answer.status == 200, answer.body
    assert node.commands == [command]
    assert answer.json["events"] == [EVENT]
    assert answer.json["seq"] == 7
    named = getattr(command, "replica", "")
    assert answer.json.get("replica", {}).get("id", "") == named


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/admin/replicas/p0/drain", {"deadline": 3}, "deadline", "did you mean deadline_s?"),
        ("/admin/replicas/p0/drain", {"deadline_s": -1}, "deadline_s", "seconds from 0"),
        ("/admin/replicas/p0/drain", {"deadline_s": 1e9}, "deadline_s", "to 604800"),
        ("/admin/replicas/p0/drain", {"deadline_s": True}, "deadline_s", "seconds from 0"),
        ("/admin/replicas/p0/drain", {"deadline_s": 10**400}, "deadline_s", "to 604800"),
        ("/admin/replicas/p0/restart", {"deadline_s": "3"}, "deadline_s", "seconds from 0"),
        ("/admin/restart", {"stop": 1, "deadline_s": 3}, "stop", "true, alone"),
        ("/admin/restart", {"stop": 1}, "stop", "true, alone"),
        ("/admin/replicas/p0/undrain", {"deadline_s": 3}, "deadline_s", "unknown parameter"),
        ("/admin/replicas/p0/mutate", {}, "role", "missing"),
        ("/admin/replicas/p0/mutate", {"role": "juggler"}, "role", "prefill, decode, colocated"),
        ("/admin/replicas/p0/mutate", {"role": ["decode"]}, "role", "prefill, decode, colocated"),
        ("/admin/replicas/d0/live", {}, "old", "missing"),
        ("/admin/replicas/d0/live", {"old": "p0", "new": "d0"}, "new", "unknown parameter"),
        ("/admin/scale", {"prefill": 1}, "decode", "missing"),
        ("/admin/scale", {"prefill": 1.5, "decode": 1}, "prefill", "an integer from 0"),
        ("/admin/scale", {"prefill": True, "decode": 1}, "prefill", "an integer from 0"),
        ("/admin/scale", {"prefill": 1, "decode": 1, "remove": "d0"}, "remove", "alone"),
        ("/admin/scale", {"auto": 1}, "auto", "alone and as true"),
        ("/admin/scale", {"auto": 1, "decode": 1}, "auto", "alone and as true"),
        ("/admin/policy", {}, None, "drain_ms, mutate_after_load"),
        ("/admin/policy", {"preset": 3}, "preset", "a name of docs/baselines.md"),
        ("/admin/policy", {"drain_ns": 3}, "drain_ns", "did you mean drain_ms?"),
        ("/admin/policy", {"drain_ms": 0}, "drain_ms", "an integer from 1 to 86400000"),
        ("/admin/policy", {"drain_ms": 2**80}, "drain_ms", "an integer from 1 to 86400000"),
        ("/admin/replicas/p0/drain", b"[]", None, "a JSON object"),
        ("/admin/replicas/p0/drain", b"{", None, "not valid JSON"),
    ],
)
def test_a_bad_body_is_refused_by_the_field_and_reaches_nobody(
    path: str, body: Any, param: str | None, says: str
) -> None:
    node = ScriptedNode()
    answer = post(node, path, body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert says in answer.error["message"]
    assert node.commands == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *((f"/admin/replicas/x9/{verb}", {}) for verb in ("drain", "undrain", "restart")),
        ("/admin/replicas/x9/mutate", {"role": "decode"}),
        ("/admin/replicas/%FF/deactivate", {}),
        ("/admin/scale", {"remove": "x9"}),
        *(("/admin/scale", {"remove": wanted}) for wanted in (9, "", 0, False, [], {}, ["p0"])),
    ],
)
def test_a_replica_that_is_not_there_is_a_404_and_not_in_the_log(path: str, body: Any) -> None:
    node = ScriptedNode()
    answer = post(node, path, body)
    assert answer.status == 404
    assert answer.error["code"] == "unknown_replica"
    assert "there are p0, d0" in answer.error["message"]
    assert node.commands == []


def test_what_does_not_fit_the_state_is_a_409_with_the_reason() -> None:
    def refuses(command: object) -> list[dict[str, Any]]:
        raise CommandFailed("deactivate p0: it is Prefill", status=409, code="conflict")

    answer = post(ScriptedNode(decides=refuses), "/admin/replicas/p0/deactivate")
    assert answer.status == 409
    assert answer.error["message"] == "deactivate p0: it is Prefill"
    assert answer.error["code"] == "conflict"


def test_the_replicas_and_the_policy_can_be_read() -> None:
    node = ScriptedNode()
    with served(node) as server:
        shown = server.ask("GET", "/admin/replicas", admin=True).json
        assert shown == {name: node.state()[name] for name in ("seq", "now_ns", "replicas")}
        one = server.ask("GET", "/admin/replicas/d0", admin=True).json
        assert one == node.state()["replicas"][1]
        assert server.ask("GET", "/admin/replicas/d9", admin=True).status == 404
        assert server.ask("GET", "/admin/policy", admin=True).json == {"policy": node.policy()}


# Who may use it.


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:11237", 200),
        ("127.0.0.1:11237", 200),
        ("10.1.2.3", 200),
        ("[::1]:11237", 200),
        ("evil.example", 403),
        ("evil.example:11237", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_another_name_for_this_machine_is_refused(host: str, status: int) -> None:
    """DNS rebinding: a page's own name leads here, and its script is of the same origin."""
    with served(ScriptedNode()) as server:
        answer = server.ask("GET", "/admin/state", headers={"Host": host}, admin=True)
    assert answer.status == status
    if status == 403:
        assert answer.error["param"] == "Host"
        assert "accepted: an IP address or localhost" in answer.error["message"]


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_what_a_page_can_send_without_asking_is_refused(content_type: str | None) -> None:
    node = ScriptedNode()
    with served(node) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.where.admin_port, timeout=10)
        headers = {"Content-Type": content_type} if content_type else {}
        connection.request("POST", "/admin/replicas/p0/drain", b"{}", headers)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        connection.close()
    assert response.status == 415
    assert "application/json" in error["message"]
    assert node.commands == []


def test_the_unix_socket_is_for_its_owner_and_group_and_knows_no_names(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with served(ScriptedNode(), admin_socket=path):
        assert path.stat().st_mode & 0o777 == 0o660
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(path))
            sock.sendall(b"GET /admin/state HTTP/1.1\r\nHost: blitzd\r\n\r\n")
            assert b"200 OK" in sock.recv(65536)
    assert not path.exists()


def test_the_plan_is_the_last_record_and_what_it_waits_for() -> None:
    with served(ScriptedNode()) as server:
        plan = server.ask("GET", "/admin/plan", admin=True).json
    assert (plan["autoscale"], plan["pinned"], plan["seq"]) == (False, False, 0)
    assert plan["roles"]["prefill"] == {
        "wanted": 0,
        "ready": 0,
        "loading": 0,
        "dead": 0,
        "draining": 0,
        "verdict": "",
        "since_ns": 0,
        "peak": 0,
    }
