"""The live scheduler in virtual time against a measured vLLM run (Llama-3.1-8B, RTX 4090).

Rates come from the first third of the run alone; the bounds are on the whole of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import blitzd
from blitzd.sim.calibrate import (
    Engine,
    Rates,
    RooflineCost,
    calibrate,
    compare,
    load_measured,
    replay,
)
from blitzd.sim.data import RTX4090_REQUESTS
from blitzd.sim.errors import TraceError
from blitzd.sim.hardware import GPUS
from blitzd.sim.lane import Job
from blitzd.sim.models import MODELS
from blitzd.sim.replay import Replay, scheduler_for
from blitzd.sim.roofline import Roofline

MODEL, GPU = MODELS["llama-3.1-8b"], GPUS["rtx4090"]
ENGINE = Engine(max_batch_tokens=2048, max_batch_size=256)
RULE = Roofline(MODEL, GPU, 1).kv_capacity_tokens() // 16
"""KV blocks by the roofline's memory rule, before any fit."""


@pytest.fixture(scope="module")
def measured():
    return load_measured(RTX4090_REQUESTS)


def errors(measured, capacities):
    """{metric: relative error} over the whole run."""
    window = max(job.end_ns for job in measured) // 3
    found = calibrate(measured, MODEL, GPU, ENGINE, window, capacities)
    replayed, _ = replay(measured, MODEL, found.rates, found.kv_blocks, ENGINE)
    return {row[0].split(",")[0]: row[3] for row in compare(measured, replayed).rows}


def assert_within(found, mean, tail):
    assert abs(found["throughput"]) < mean
    for name in ("TTFT", "TPOT"):
        assert abs(found[f"{name} mean"]) < mean
        assert abs(found[f"{name} p99"]) < tail


def test_the_run_is_met_with_the_kv_of_the_memory_rule(measured):
    assert_within(errors(measured, [RULE]), 0.05, 0.10)


@pytest.mark.slow
def test_the_run_is_met_more_closely_with_the_kv_fitted_too(measured):
    assert_within(errors(measured, range(RULE - 48, RULE + 49, 12)), 0.02, 0.02)


def test_only_the_window_takes_part(measured):
    """What was measured after the window may be anything: the fit does not move."""
    window = max(job.end_ns for job in measured) // 3
    spoiled = [
        Job(
            job.arrival_ns,
            job.prompt_tokens,
            job.output_tokens,
            job.first_ns if job.first_ns < window else 10 * job.first_ns,
            job.end_ns if job.end_ns < window else 10 * job.end_ns,
        )
        for job in measured
    ]
    fits = [calibrate(jobs, MODEL, GPU, ENGINE, window, [RULE]) for jobs in (measured, spoiled)]
    assert fits[0] == fits[1]


def test_known_rates_are_found_again():
    truth = Rates(800e9, 100e12, 0.5e-3)
    jobs = [Job(i * 30_000_000, 100 + 37 * i % 900, 40 + 13 * i % 60) for i in range(120)]
    made, _ = replay(jobs, MODEL, truth, 5000, ENGINE)
    found = calibrate(made, MODEL, GPU, ENGINE, 10**12, [5000])
    assert found.error_s < 0.1
    assert found.rates.bytes_per_s == pytest.approx(truth.bytes_per_s, rel=0.03)
    assert found.rates.flops_per_s == pytest.approx(truth.flops_per_s, rel=0.05)


def test_a_step_costs_the_slower_of_reading_weights_and_computing():
    rates = Rates(1e12, 1e14, 0.0)
    cost = RooflineCost(MODEL, rates)
    run = Replay([Job(0, 8, 2)], scheduler_for(100, 16, 2048, 8), cost)
    run.run()
    weights = MODEL.weight_bytes / 1e12 * 1e9
    assert run.now == pytest.approx(2 * weights, rel=0.01)


def test_no_rate_exceeds_the_data_sheet():
    """A light load says little about memory and compute apart; the fit stays physical."""
    truth = Rates(800e9, 100e12, 0.5e-3)
    jobs = [Job(i * 150_000_000, 100 + 37 * i % 900, 40 + 13 * i % 60) for i in range(120)]
    made, _ = replay(jobs, MODEL, truth, 5000, ENGINE)
    rates = calibrate(made, MODEL, GPU, ENGINE, 10**12, [5000]).rates
    assert rates.bytes_per_s <= GPU.memory_gb_s * 1e9
    assert rates.flops_per_s <= GPU.tflops * 1e12


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"first_token_ts": None}, "first_token_ts"),
        ({"output_toks": 0}, "output_toks"),
        ({"arrival_time": "noon"}, "arrival_time"),
    ],
)
def test_a_bad_measurement_is_refused_with_line_and_field(tmp_path, change, field):
    lines = RTX4090_REQUESTS.read_text().splitlines()[:2]
    path = tmp_path / "run.jsonl"
    path.write_text(lines[0] + "\n" + json.dumps({**json.loads(lines[1]), **change}) + "\n")
    with pytest.raises(TraceError, match=f"run.jsonl:2: {field}: "):
        load_measured(path)


@pytest.mark.parametrize(
    "command",
    [
        "kv --model opt-66b --gpu a100 --tokens 512",
        "placement --model llama-3.1-8b --gpus-per-node 1 --rate 5 --requests 200",
        "batching --out {out} --seed 3 --kv-blocks 400 --shared-prefix 64",
    ],
)
def test_report_hashes_do_not_depend_on_the_process(tmp_path, command):
    script = "from blitzd.cli.sim import app; import sys; app(sys.argv[1:])"
    hashes = set()
    for seed in ("1", "2"):
        arguments = command.format(out=tmp_path / seed).split()
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(Path(blitzd.__file__).parents[1]),
        }
        printed = subprocess.run(
            [sys.executable, "-c", script, *arguments, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        hashes.add(json.loads(printed)["report_hash"])
    assert len(hashes) == 1
