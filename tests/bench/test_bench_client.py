"""The load client on streams made by hand: what is timed, and what has failed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from blitzd.bench.client import Outcome, Planned, timed
from blitzd.bench.report import as_text, line, report
from blitzd.cli.client import client

ONE = Planned(1.0, 5, 3)
Stream = list[tuple[float, dict[str, Any]]]


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": None, **fields}]}


def told(stream: Stream) -> Outcome:
    async def events() -> AsyncIterator[tuple[float, dict[str, Any]]]:
        for event in stream:
            yield event

    return asyncio.run(timed(events(), ONE, since_start=1.0, sent=100.0))


GOOD: Stream = [
    (100.1, choice(delta={"role": "assistant", "content": ""})),
    (100.5, choice(delta={"content": "a"})),
    (100.7, choice(delta={"content": "b"})),
    (101.1, choice(delta={"content": "c"}, finish_reason="stop")),
    (101.2, {"choices": [], "usage": {"completion_tokens": 3}}),
]


def test_the_first_token_is_the_first_content() -> None:
    """Peers #71: not the chunk that names a role."""
    found = told(GOOD)
    assert found.error == ""
    assert found.first_s == pytest.approx(0.5)


def test_the_time_to_the_first_token_is_no_gap() -> None:
    """Peers #73."""
    found = told(GOOD)
    assert found.gaps_s == pytest.approx((0.2, 0.4))
    assert found.tpot_s == pytest.approx(0.3)


def test_text_of_completions_counts_too() -> None:
    found = told([(100.5, choice(text="a", finish_reason="length"))])
    assert (found.error, found.first_s) == ("", pytest.approx(0.5))
    assert found.tpot_s is None, "one token has no time between tokens"


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (GOOD[:3], "ended without a finish"),
        ([*GOOD[:3], (101.0, {"error": {"code": "worker_lost"}})], "worker_lost"),
        ([], "ended without a finish"),
        ([(100.5, choice(text="", finish_reason="length"))], "no content"),
    ],
)
def test_what_did_not_end_well_has_failed(stream: Stream, error: str) -> None:
    assert told(stream).error == error


def test_failures_are_in_no_latency_and_are_shown() -> None:
    """Peers #72: a refusal after a millisecond must not make the median better."""
    good = [told(GOOD) for _ in range(2)]
    refused = [Outcome(ONE, 1.0, "429 queue_full") for _ in range(8)]
    found = report(good + refused)
    assert found["failed"] == {"429 queue_full": 8}
    assert found["succeeded"] == 2
    assert found["ttft_ms"]["p50"] == found["ttft_ms"]["max"] == 500.0
    assert found["output_tokens"] == 6
    assert "failed: 8 429 queue_full" in as_text(found)


def test_nothing_measured_is_not_zero() -> None:
    found = report([Outcome(ONE, 1.0, "timeout")])
    assert found["ttft_ms"] is None
    assert "nothing was measured" in as_text(found)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    outcomes = [Outcome(ONE, 1.0, "", float(n), float(n), (), 1) for n in range(1, 11)]
    spread = report(outcomes)["ttft_ms"]
    assert (spread["p50"], spread["p90"], spread["p99"]) == (5000.0, 9000.0, 10_000.0)


def test_requests_that_the_client_held_up_are_said() -> None:
    found = report([told(GOOD)._replace(sent_s=1.3)])
    assert (found["sent_late"], found["sent_late_max_ms"]) == (1, 300.0)


def test_a_line_tells_one_request_from_another_by_its_text() -> None:
    named = [(when, event | {"id": "cmpl-7"}) for when, event in GOOD]
    other = [(100.5, choice(text="abd", finish_reason="stop"))]
    whole = [(100.5, choice(text="abc", finish_reason="stop"))]
    shown = line(told(named))
    assert (shown["id"], shown["output_tokens"], shown["ttft_ms"]) == ("cmpl-7", 3, 500.0)
    assert shown["max_gap_ms"] == 400.0
    assert shown["text_digest"] == line(told(whole))["text_digest"]
    assert shown["text_digest"] != line(told(other))["text_digest"]
    failed = line(told([(101.0, {"id": "cmpl-8", "error": {"code": "worker_lost"}})]))
    assert (failed["id"], failed["error"]) == ("cmpl-8", "worker_lost")
    assert "ttft_ms" not in failed


def test_a_trace_that_is_none_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    assert client(trace=tmp_path / "t.csv") == 2
    assert "blitzd client: " in capsys.readouterr().err
