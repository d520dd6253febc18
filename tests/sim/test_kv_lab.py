"""The lab on the live scheduler: it agrees with the plain lab where KV is ample, and running
out of KV has a price."""

import random

import pytest

from blitzd.cli.sim import app
from blitzd.sim import batching
from blitzd.sim.errors import InputError
from blitzd.sim.kvlab import KvOptions, lab_cost, run_kv_limited, run_shared_prefix
from blitzd.sim.lane import Job
from blitzd.sim.replay import Replay, scheduler_for
from blitzd.sim.requests import Request, generate_fixture

FIXTURE = generate_fixture(1)


def options(blocks, preemption="recompute", seqs=32):
    return KvOptions(blocks, seqs, preemption, 25.0, 131072)


@pytest.mark.parametrize("seed", range(15))
def test_with_ample_kv_the_live_scheduler_gives_the_labs_times(seed):
    rng = random.Random(seed)
    requests = [Request(rng.randint(1, 400), rng.randint(1, 60)) for _ in range(rng.randint(1, 40))]
    slots, now, arrivals = rng.randint(1, 10), 0, []
    for _ in requests:
        now += rng.randint(0, 60_000_000)
        arrivals.append(now)
    plain = batching.run_open_loop(requests, arrivals, slots)
    jobs = [Job(at, *request) for at, request in zip(arrivals, requests, strict=True)]
    budget = sum(map(sum, requests)) + slots
    replay = Replay(jobs, scheduler_for(5000, 16, budget, slots), lab_cost)
    replay.run()
    assert [job.ttft_ns for job in jobs] == plain.ttft_ns
    assert replay.now == plain.end_ns
    replay.scheduler.audit()
    assert replay.scheduler.blocks.used == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_less_kv_preempts_more_and_costs_throughput(preemption):
    runs = [run_kv_limited(FIXTURE, options(blocks, preemption)) for blocks in (1000, 600, 200)]
    assert [run["price"] for run in runs] == sorted(run["price"] for run in runs)
    assert runs[0]["price"] == runs[0]["preemptions"] == runs[0]["preemption_ms"] == 0
    for run in runs[1:]:
        assert run["preemptions"] > 0 < run["preemption_ms"]
        assert run["throughput_tps"] < run["unlimited_tps"]
        assert (run["recomputed_tokens"] > 0) is (preemption == "recompute")
        assert (run["swapped_tokens"] > 0) is (preemption == "swap")


def test_a_slow_way_to_host_memory_makes_swapping_dearer():
    fast, slow = (
        run_kv_limited(FIXTURE, KvOptions(300, 32, "swap", rate, 131072)) for rate in (50.0, 0.5)
    )
    assert slow["preemption_ms"] == pytest.approx(100 * fast["preemption_ms"], rel=0.01)
    assert slow["price"] > fast["price"]


def test_every_request_ends_under_heavy_swapping():
    jobs = [Job(0, *request) for request in FIXTURE]
    replay = Replay(jobs, scheduler_for(90, 16, 10**6, 64), lab_cost, swap_ns_per_token=5000)
    replay.run()
    assert all(job.end_ns >= job.first_ns > 0 for job in jobs)
    replay.scheduler.audit()
    assert replay.scheduler.blocks.used == 0


def test_a_shared_prefix_is_computed_once_and_cuts_ttft():
    result = run_shared_prefix(FIXTURE, 2000, 32, 0)
    assert result["cached_tokens"] >= 97 * 2000
    assert 4 < result["speedup"] < 8.5
    assert run_shared_prefix(FIXTURE, 16, 32, 0)["speedup"] < 1.2


def test_a_request_that_can_never_fit_is_named():
    with pytest.raises(InputError, match=r"request 1: .*this replica holds 160"):
        run_kv_limited([Request(5, 5), Request(150, 100)], options(10))


def test_the_options_write_their_files(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command = f"batching --out {tmp_path} --kv-blocks 300 --preemption swap"
        app([*command.split(), "--shared-prefix", "500"])
    assert ended.value.code == 0
    capsys.readouterr()
    pairs = dict(p.split("=") for p in (tmp_path / "kv.txt").read_text().split())
    assert (pairs["kv_blocks"], pairs["preemption"]) == ("300", "swap")
    assert float(pairs["price"]) > 0
    pairs = dict(p.split("=") for p in (tmp_path / "prefix.txt").read_text().split())
    assert float(pairs["speedup"]) > 1
