"""The lab against a slow, obvious stepper, and the document's conditions on the fixture."""

import csv
import json
import random
import subprocess
import sys
from collections import deque
from itertools import pairwise
from pathlib import Path

import pytest

from blitzd.cli.sim import app
from blitzd.sim import batching
from blitzd.sim.arrivals import poisson_arrivals
from blitzd.sim.lab import LabOptions, run_lab
from blitzd.sim.requests import Request, generate_fixture
from blitzd.sim.stats import percentile

SEEDS = range(40)


def random_set(seed: int) -> list[Request]:
    rng = random.Random(seed)
    longest = rng.choice([1, 3, 30, 300])
    count = rng.randint(1, 60)
    return [Request(rng.randint(1, 900), rng.randint(1, longest)) for _ in range(count)]


def stepped_static(requests, batch_size):
    """(steps, slots in use at each step)"""
    used = []
    for start in range(0, len(requests), batch_size):
        left = [r.output_tokens for r in requests[start : start + batch_size]]
        while any(left):
            used.append(sum(1 for tokens in left if tokens))
            left = [max(0, tokens - 1) for tokens in left]
    return used


def stepped_continuous(requests, slots):
    queue, left, used = deque(requests), [], []
    while queue or left:
        while queue and len(left) < slots:
            left.append(queue.popleft().output_tokens)
        used.append(len(left))
        left = [tokens - 1 for tokens in left if tokens > 1]
    return used


class SteppedServer:
    """One iteration at a time: fill slots, prefill the newcomers, one step for everyone."""

    def __init__(self, slots):
        self.slots, self.now = slots, 0
        self.queue, self.running = deque(), []
        self.waits, self.ttfts, self.peak = [], [], 0

    def iterate(self):
        """Runs one iteration; returns how many requests ended."""
        start, fresh = self.now, []
        while self.queue and self.queue[0][0] <= start and len(self.running) < self.slots:
            arrival, request = self.queue.popleft()
            fresh.append(arrival)
            self.waits.append(start - arrival)
            self.now += request.prompt_tokens * 50_000
            self.running.append(request.output_tokens)
        self.peak = max(self.peak, len(self.running))
        self.now += 8_000_000
        self.ttfts += [self.now - arrival for arrival in fresh]
        ended = self.running.count(1)
        self.running = [tokens - 1 for tokens in self.running if tokens > 1]
        return ended

    def idle_until_arrival(self):
        if not self.running and self.queue and self.queue[0][0] > self.now:
            self.now = self.queue[0][0]


def stepped_open_loop(requests, arrivals, slots):
    server = SteppedServer(slots)
    server.queue.extend(zip(arrivals, requests, strict=True))
    while server.queue or server.running:
        server.idle_until_arrival()
        server.iterate()
    return server


def stepped_closed_loop(requests, clients):
    server, backlog = SteppedServer(clients), deque(requests)
    for _ in range(min(clients, len(requests))):
        server.queue.append((0, backlog.popleft()))
    while server.queue or server.running:
        for _ in range(server.iterate()):
            if backlog:
                server.queue.append((server.now, backlog.popleft()))
    return server


def expand(slots):
    return [used for steps, used in slots for _ in range(steps)]


@pytest.mark.parametrize("seed", SEEDS)
def test_step_counts_equal_stepping(seed):
    requests = random_set(seed)
    slots = random.Random(~seed).randint(1, 20)
    for run, used in (
        (batching.run_static(requests, slots), stepped_static(requests, slots)),
        (batching.run_continuous(requests, slots), stepped_continuous(requests, slots)),
    ):
        assert run.total_steps == len(used)
        assert expand(run.slots) == used
        assert run.peak_running == max(used)
        assert sum(used) == run.output_tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_open_loop_equals_stepping(seed):
    requests = random_set(seed)
    slots = random.Random(~seed).randint(1, 8)
    arrivals = poisson_arrivals(len(requests), 20, seed)
    run = batching.run_open_loop(requests, arrivals, slots)
    server = stepped_open_loop(requests, arrivals, slots)
    assert (run.wait_ns, run.ttft_ns) == (server.waits, server.ttfts)
    assert (run.end_ns, run.peak_running) == (server.now, server.peak)


@pytest.mark.parametrize("seed", SEEDS)
def test_closed_loop_equals_stepping(seed):
    requests = random_set(seed)
    for clients in (1, 2, 7, len(requests) + 3):
        run = batching.run_closed_loop(requests, clients)
        server = stepped_closed_loop(requests, clients)
        assert (run.ttft_ns, run.end_ns) == (server.ttfts, server.now)


@pytest.mark.parametrize("seed", range(12))
def test_reported_concurrency_is_the_largest_that_meets_the_target(seed):
    requests = random_set(seed)
    target = random.Random(~seed).choice([30, 100, 200]) * 1_000_000
    found = batching.search_concurrency(requests, target)
    meets = [
        n
        for n in range(1, len(requests) + 1)
        if percentile(stepped_closed_loop(requests, n).ttfts, 99) <= target
    ]
    assert found.clients == max(meets, default=0)


def test_p99_is_an_observed_value():
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([7], 99) == 7
    assert percentile([1, 2], 50) == 1


def test_arrival_patterns_differ_between_rates_by_scale_only():
    slow, fast = poisson_arrivals(500, 5, 3), poisson_arrivals(500, 40, 3)
    assert all(abs(s - 8 * f) <= 8 for s, f in zip(slow, fast, strict=True))
    assert slow == sorted(slow) and slow != poisson_arrivals(500, 5, 4)


@pytest.mark.parametrize("seed", range(10))
def test_the_documents_conditions_hold_on_the_fixture(seed):
    requests = generate_fixture(seed)
    assert len(requests) == 100
    lab = run_lab(requests, LabOptions(seed=seed))
    assert lab.report["static"]["slot_util"] < 0.7
    assert lab.report["compare"]["speedup"] >= 1.8
    assert lab.report["maxseqs"]["peak_running"] <= 32
    waits = [row["p99_wait_ms"] for row in lab.report["queue"]]
    assert all(a < b for a, b in pairwise(waits))
    scan = {row["clients"]: row["p99_ttft_ms"] for row in lab.report["tune_scan"]}
    best = lab.report["tune"]["max_concurrency"]
    assert scan[best] <= 200
    assert all(p99 > 200 for n, p99 in scan.items() if n > best)


def run_cli(*arguments):
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    return ended.value.code


def test_files_carry_exactly_the_documents_keys(tmp_path, capsys):
    source = tmp_path / "requests.json"
    source.write_text(json.dumps([r._asdict() for r in generate_fixture(0)]))
    out, plot = tmp_path / "out", tmp_path / "slots.png"
    code = run_cli("batching", "--requests", str(source), "--out", str(out), "--plot", str(plot))
    assert code == 0
    keys = {
        "static.txt": ["total_steps", "throughput_tps", "slot_util"],
        "compare.txt": ["static_tps", "continuous_tps", "speedup"],
        "maxseqs.txt": ["max_num_seqs", "peak_running"],
        "cost.txt": ["total_prefill_ms", "total_decode_ms", "decode_share"],
        "tune.txt": ["target_ttft_ms", "max_concurrency", "throughput_at_target"],
    }
    for name, expected in keys.items():
        (line,) = (out / name).read_text().splitlines()
        pairs = dict(pair.split("=") for pair in line.split(" "))
        assert list(pairs) == expected
        assert all(float(value) >= 0 for value in pairs.values())
    with (out / "queue.csv").open() as lines:
        rows = list(csv.reader(lines))
    assert rows[0] == ["rps", "avg_queue", "p99_wait_ms"]
    assert [row[0] for row in rows[1:]] == ["5", "10", "20", "40"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "report hash" in capsys.readouterr().out


def test_without_requests_the_drawn_ones_are_kept_and_give_the_same_report(tmp_path, capsys):
    assert run_cli("batching", "--out", str(tmp_path), "--seed", "5", "--json") == 0
    first = json.loads(capsys.readouterr().out)
    kept = str(tmp_path / "requests.json")
    arguments = ("--requests", kept, "--out", str(tmp_path), "--seed", "5", "--json")
    assert run_cli("batching", *arguments) == 0
    assert json.loads(capsys.readouterr().out) == first


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        ("[]", 1, "requests"),
        ('{"prompt_tokens": 1}', 1, "requests"),
        (
            '[\n{"prompt_tokens": 5, "output_tokens": 2},\n{"prompt_tokens": 5}\n]',
            3,
            "output_tokens",
        ),
        ('[\n{"prompt_tokens": -5, "output_tokens": 2}]', 2, "prompt_tokens"),
        ('[{"prompt_tokens": 5, "output_tokens": 0}]', 1, "output_tokens"),
        ('[{"prompt_tokens": 5.5, "output_tokens": 1}]', 1, "prompt_tokens"),
        ('[{"prompt_tokens": true, "output_tokens": 1}]', 1, "prompt_tokens"),
        ("[\n\n7]", 3, "requests"),
        ('[{"prompt_tokens": 5, "output_tokens": 1}\n', 2, "requests"),
        ('[{"prompt_tokens": 5, "output_tokens": 1}\n{', 2, "requests"),
        ('[{"prompt_tokens": 5, "output_tokens": 1}]\n]', 2, "requests"),
    ],
)
def test_a_bad_list_is_refused_with_line_and_field(tmp_path, capsys, text, line, field):
    source = tmp_path / "bad.json"
    source.write_text(text)
    assert run_cli("batching", "--requests", str(source), "--out", str(tmp_path / "o")) == 1
    message = capsys.readouterr().err
    assert f"bad.json:{line}: {field}: " in message
    assert not (tmp_path / "o").exists()


def test_the_report_hash_does_not_depend_on_the_hash_seed():
    script = (
        "from blitzd.sim.lab import *; from blitzd.sim.requests import generate_fixture\n"
        "print(run_lab(generate_fixture(9), LabOptions(seed=9)).report['report_hash'])"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(batching.__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1
