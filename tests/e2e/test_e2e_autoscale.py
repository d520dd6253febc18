"""A recorded burst against a live daemon: it scales up and back down by itself, every request
is answered with the tokens that one replica alone gives, and the log tells and explains it."""

import contextlib
import csv
import io
import json
import re
import subprocess
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest
import xxhash

from blitzd.bench.client import Planned, prompt_of
from blitzd.cli import app
from blitzd.engine.catalogue import DEFAULT_MODEL, prepared_dir, pull
from blitzd.engine.prepare import prepare
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sim.data import AZURE_CODE_BURST
from tests.e2e.daemon import BLITZD, Daemon, wait_for
from tests.engine.local_replica import LocalReplica

ROLES = ("prefill", "decode")
SETTINGS = {
    # Replicas that share two cores are as fast as each other: what is measured is the system.
    "engine.pace_layer_ms": 1,
    "policy.prefill_tokens_per_s": 300,
    "policy.scale_down_window_ms": 2000,
    "policy.arrival_window_ms": 2000,
    "policy.max_prefill": 3,
    "policy.max_queued_requests": 1000,
}
EVERY_MS = 250
SEED = 0
TOGETHER = 16
TIE = 1e-3
"""Logprobs of the best two closer than that: rounding, which differs with the batch, decides."""


class Burst:
    """Plays the trace's first requests; what came of it is on disk when it has returned."""

    def __init__(self, state_dir: Path, requests: int, *client: str) -> None:
        self.state_dir = state_dir
        self.series = state_dir.parent / "series.csv"
        lines = state_dir.parent / "requests.jsonl"
        settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
        options = ("--autoscale", "--spare", "2", "--kv-mib", "128", *settings)
        daemon = Daemon(state_dir, *options).start()
        try:
            daemon.ready()
            command = ("client", "--trace", str(AZURE_CODE_BURST), "--url", daemon.url, "--json")
            options = ("--limit", str(requests), "--seed", str(SEED), "--output", str(lines))
            played = subprocess.run(
                [*BLITZD, *command, *options, *client],
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            self.report: dict[str, Any] = json.loads(played.stdout)
            print(json.dumps(self.report))
            wait_for("one replica of each role again", lambda: is_back(daemon), 60.0)
            time.sleep(2 * EVERY_MS / 1000)  # so that the series has a row of it
            self.events = daemon.events()
        finally:
            daemon.end()
        self.lines = [json.loads(line) for line in lines.read_text().splitlines()]

    def replay(self, *options: object) -> Any:
        """What `blitzd replay --json` prints."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
            app(["replay", str(self.state_dir), *map(str, options), "--json"])
        assert end.value.code in (0, None), out.getvalue()
        return json.loads(out.getvalue())

    def of_type(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] in names]


def is_back(daemon: Daemon) -> bool:
    """One of each role is wanted and there, and none is on its way."""
    state = daemon.state()
    roles = [replica["role"] for replica in state["replicas"]]
    return all(state["node"]["wanted"][role] == roles.count(role) == 1 for role in ROLES)


def requests_of(burst: Burst) -> Iterator[pb.Request]:
    """As the client made them."""
    random = Random(SEED)
    for number, line in enumerate(burst.lines, 1):
        planned = Planned(line["planned_s"], line["prompt_tokens"], line["max_tokens"])
        yield pb.Request(
            request_id=number,
            prompt_tokens=prompt_of(planned, random),
            max_tokens=planned.output_tokens,
            sampling=pb.Sampling(ignore_eos=True, logprobs=2),
        )


def assert_tokens_are_those_of_one_replica(burst: Burst) -> None:
    finished = [event["payload"] for event in burst.of_type("RequestFinished")]
    digests = {f"cmpl-{event['request_id']}": event["output_digest"] for event in finished}
    alone = LocalReplica(prepare(pull(DEFAULT_MODEL), "float32", prepared_dir()))
    ties, wrong = [], []
    requests = list(requests_of(burst))
    for begin in range(0, len(requests), TOGETHER):
        some = requests[begin : begin + TOGETHER]
        alone.prefill(*some)
        for number, found in alone.until(*(one.request_id for one in some)).items():
            best_two = [entry.top for entry in found.logprobs.values()]
            if any(first[1] - second[1] < TIE for first, second in best_two):
                ties.append(number)
                continue
            packed = b"".join(token.to_bytes(4, "little") for token in found.tokens)
            line = burst.lines[number - 1]
            ours = (xxhash.xxh3_64_hexdigest(packed), xxhash.xxh3_64_hexdigest(found.text.encode()))
            if ours != (digests[line["id"]], line["text_digest"]):
                wrong.append(number)
    alone.close()
    print(f"{len(burst.lines)} requests, not compared for near ties: {ties}")
    assert wrong == []
    assert len(ties) <= len(burst.lines) // 20


def assert_every_plan_is_explained(burst: Burst) -> None:
    plans = burst.of_type("PlanDecided", "PlanHeld")
    assert plans
    for plan in plans:
        decided, shown = plan["payload"], burst.replay("--plan", plan["seq"])
        facts = shown["facts"]
        assert shown["record"]["payload"] == decided
        assert shown["cause"]["seq"] == plan["cause"] < plan["seq"]
        inputs, terms = dict(decided["inputs"]), dict(decided["terms"])
        assert facts["inputs"] == inputs
        for term in ("prefill_backlog", "prefill_use", "decode_use", "decode_transfer"):
            bounds = f"{terms[f'{term}_least']} "
            assert bounds in facts["terms"][term], facts
        assert f"{inputs['waiting_tokens']} tokens wait" in facts["terms"]["prefill_backlog"]
        before = burst.replay("--state", "--until", plan["seq"] - 1)["replicas"]
        for role in ROLES:
            count = sum(r["role"] == role and r["state"] != "Failed" for r in before)
            why = facts["why"][role]
            assert re.match(rf"{count}\b", why), why
            if decided[role] in ("up", "down"):
                wanted = decided[f"wanted_{role}"]
                assert why.startswith(f"{count} → {wanted}: "), why
                assert (wanted > count) == (decided[role] == "up")


def humps(numbers: list[int]) -> list[int]:
    """Where the series turns, both ends included: 1, 3, 1 is one hump."""
    flat = [number for number, _ in groupby(numbers)]
    ends = (flat[0], flat[-1])
    inner = [b for a, b, c in zip(flat, flat[1:], flat[2:], strict=False) if (b > a) == (b > c)]
    return [ends[0], *inner, *ends[1:]]


def assert_the_log_tells_the_story(burst: Burst) -> list[int]:
    """Turns of the prefill replicas' number."""
    burst.replay("--csv", burst.series, "--every", EVERY_MS)
    with burst.series.open(newline="") as file:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert sum(row["finished_requests"] for row in rows) == len(burst.lines)
    assert sum(row["prefill_tokens"] for row in rows) == sum(
        line["prompt_tokens"] for line in burst.lines
    )
    serving = [row["prefill_replicas"] for row in rows if row["prefill_replicas"]]
    assert serving[-1] == 1
    assert (rows[-1]["queued_requests"], rows[-1]["kv_blocks"]) == (0, 0)
    wanted = [plan["payload"]["wanted_prefill"] for plan in burst.of_type("PlanDecided")]
    assert max(wanted) >= 2
    assert wanted[-1] == 1
    assert burst.replay("--redecide")["difference"] is None
    return humps(serving)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_bursts_scale_up_and_back_down_and_every_request_is_answered(state_dir: Path) -> None:
    """All 700 requests: a minute of them, 40 s of none, 50 s of them."""
    scaled = ("--speed", "0.4", "--prompt-scale", "0.01", "--max-output", "6")
    burst = Burst(state_dir, 700, *scaled)
    assert (burst.report["succeeded"], burst.report["failed"]) == (700, {})
    turns = assert_the_log_tells_the_story(burst)
    print(f"prefill replicas: {turns}")
    assert len(turns) >= 5
    assert_every_plan_is_explained(burst)
    assert_tokens_are_those_of_one_replica(burst)


def test_a_burst_scales_up_and_back_down(state_dir: Path) -> None:
    burst = Burst(state_dir, 40, "--speed", "2", "--prompt-scale", "0.02", "--max-output", "4")
    assert (burst.report["succeeded"], burst.report["failed"]) == (40, {})
    assert_the_log_tells_the_story(burst)
    assert_every_plan_is_explained(burst)
    assert_tokens_are_those_of_one_replica(burst)
