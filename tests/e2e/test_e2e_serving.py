"""What a client of the real daemon sees: the embedded model in real worker processes, prefill
and decode apart, KV handed over both ways."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blitzd.engine import catalogue
from blitzd.engine.prepare import prepare
from blitzd.engine.tokenizer import Tokenizer
from tests.e2e.conformance import check_openai_surface
from tests.e2e.daemon import Daemon, blitzd_json

GOLDENS = Path(__file__).parent.parent / "data" / "goldens" / "smollm2-135m-float32.json"
# Chat and plain, 1 to 1,500 tokens, ASCII and not, a whole block and one more. The rest of the
# goldens is checked where a token costs less, on the model itself.
NAMES = (
    *("chat-0", "chat-5", "chat-8", "plain-0", "plain-1", "plain-5", "plain-6", "plain-7"),
    *("length-64", "length-65", "length-128", "length-300", "length-512", "length-1500"),
)
CASES: list[dict[str, Any]] = [
    case for case in json.loads(GOLDENS.read_text())["cases"] if case["name"] in NAMES
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    source = catalogue.resolve("smollm2-135m")
    return Tokenizer.from_dir(prepare(source, "float32", catalogue.prepared_dir()))


def test_a_chat_streams_an_answer_that_names_paris(daemon: Daemon) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    chunks = list(daemon.stream("/v1/chat/completions", {"messages": [question]}))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert "Paris" in text
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_openai_client_works_for_every_shape(daemon: Daemon) -> None:
    check_openai_surface(f"{daemon.url}/v1", "smollm2-135m")


def golden_text(daemon: Daemon, case: dict[str, Any], tokens: int) -> str:
    """Asked for by token ids, so that nothing but the model stands between."""
    wanted = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = daemon.complete(prompt=case["prompt_ids"], **wanted)
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == tokens
    text: str = choice["text"]
    return text


# One after the other a token costs the most: what is long runs together with others.
@pytest.mark.parametrize(("together", "tokens", "every"), [(1, 12, 1), (4, 64, 2), (16, 64, 1)])
def test_greedy_answers_equal_those_of_transformers(
    daemon: Daemon, tokenizer: Tokenizer, together: int, tokens: int, every: int
) -> None:
    cases = CASES[::every] + CASES[: max(0, together - len(CASES))]
    with ThreadPoolExecutor(together) as clients:
        texts = list(clients.map(lambda case: golden_text(daemon, case, tokens), cases))
    wrong = [
        case["name"]
        for case, text in zip(cases, texts, strict=True)
        if text != tokenizer.decode(case["output_ids"][:tokens])
    ]
    assert not wrong
    daemon.idle()


def test_nothing_is_left_when_nothing_runs(daemon: Daemon) -> None:
    state = daemon.idle()
    assert state["links"] == []
    assert state["queue"] == {"requests": 0, "tokens": 0}
    moving = ("queued", "prefilling", "migrating", "decoding")
    assert all(state["requests"][name] == 0 for name in moving)


def test_the_log_replays_to_the_state_that_the_daemon_shows(daemon: Daemon) -> None:
    shown = daemon.idle()
    until = str(shown["seq"])
    replayed = blitzd_json("replay", str(daemon.state_dir), "--state", "--until", until)
    assert replayed["hash"] == shown["hash"]
    assert replayed == {name: shown[name] for name in replayed}
    verified = blitzd_json("log", "verify", str(daemon.state_dir))
    assert verified["ok"]
    assert verified["problems"] == []
    assert verified["last_seq"] >= shown["seq"]


def test_every_request_went_through_prefill_and_decode_replicas(daemon: Daemon) -> None:
    events = daemon.events()
    moved = [e["payload"] for e in events if e["type"] == "MigrationFinished"]
    assert moved
    assert all(m["bytes_moved"] > 0 for m in moved)
    assert not [e for e in events if e["type"] in ("RequestFailed", "MigrationFailed")]
