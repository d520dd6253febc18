"""Whatever JSON comes, the answer is a 2xx or a named 4xx, soon."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from blitzd.http.neutral import NEUTRAL_CHAT, NEUTRAL_COMPLETION
from blitzd.http.schema import ChatRequest, CompletionRequest
from tests.http.scripted_node import MODEL, ScriptedNode
from tests.http.served import Answer, Served, frames, served

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    | NEUTRAL_CHAT.keys()
    | NEUTRAL_COMPLETION.keys()
    | {"role", "content", "type", "text", "name", "tool_calls", "include_usage"}
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from([MODEL, "user", "system", "assistant", "text", "auto", "none"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=15,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"]), "content": st.text(max_size=30)}
    ),
    min_size=1,
    max_size=4,
)
paths = st.sampled_from([CHAT, PLAIN])
SETTINGS = settings(
    max_examples=300, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    node = ScriptedNode()
    with served(node) as running:
        yield running
    assert node.open == {}


def check(answer: Answer) -> None:
    if answer.status == 200:
        if answer.headers["Content-Type"].startswith("text/event-stream"):
            assert frames(answer.body)[-1] == "[DONE]"
        else:
            assert answer.json["choices"]
        return
    assert answer.status in (400, 404), (answer.status, answer.body)
    error = answer.error
    assert error["code"] not in (None, "internal_error")
    assert error["param"] is not None or error["code"] in ("invalid_json", "invalid_type")


@given(path=paths, body=values)
@SETTINGS
def test_any_json(server: Served, path: str, body: Any) -> None:
    check(server.ask("POST", path, json.dumps(body).encode()))


@given(
    path=paths,
    right=st.fixed_dictionaries({"model": st.just(MODEL)}),
    prompt=messages | st.text(min_size=1, max_size=30),
    wrong=st.dictionaries(st.sampled_from(FIELDS), values, max_size=2),
)
@SETTINGS
@example(path=CHAT, right={"model": MODEL}, prompt="x", wrong={"messages": [{"role": "a`"}]})
def test_a_good_body_with_a_few_wrong_fields(
    server: Served, path: str, right: dict[str, Any], prompt: Any, wrong: dict[str, Any]
) -> None:
    key = "messages" if path == CHAT else "prompt"
    check(server.ask("POST", path, {**right, key: prompt, **wrong}))


@given(path=paths, body=st.binary(max_size=200))
@SETTINGS
def test_any_bytes(server: Served, path: str, body: bytes) -> None:
    check(server.ask("POST", path, body))


@given(
    query=st.dictionaries(st.sampled_from(["since", "limit", "follow", "x"]), st.text(max_size=8))
)
@SETTINGS
def test_any_query(server: Served, query: dict[str, str]) -> None:
    if query.get("follow") in ("1", "true"):
        return  # a stream without an end, by request
    answer = server.ask("GET", f"/admin/events?{urlencode(query)}", admin=True)
    assert answer.status in (200, 400)
    if answer.status == 400:
        assert answer.error["param"] in query
