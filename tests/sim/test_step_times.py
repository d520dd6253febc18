"""Step times from the roofline and from each kind of coefficients file."""

import json

import numpy as np
import pytest

from blitzd.sim.coefficients import PROFILE, load_coefficients, nonnegative_lstsq
from blitzd.sim.data import DISTSERVE_PROFILE, SPLITWISE_PERF_MODEL
from blitzd.sim.errors import InputError
from blitzd.sim.hardware import GPUS
from blitzd.sim.models import MODELS
from blitzd.sim.roofline import Roofline
from blitzd.sim.steptimes import RooflineSteps


def test_distserve_coefficients_become_ns():
    loaded = load_coefficients(DISTSERVE_PROFILE, "opt-13b", "a100")
    assert sorted(loaded.by_tp) == [1, 2, 4]
    one = loaded.by_tp[1]
    # 18.1025 + 0.101912 * 1000 + 7.1223e-6 * 1000^2 ms
    assert one.prefill_ns([1000]) == pytest.approx(127.137e6, rel=1e-4)
    assert one.decode(10) == (19_934_703 + 10 * 38_507, 627)
    assert one.decode(95) == (7_166_189 + 95 * 158_311, 580)
    assert loaded.kv_tokens[2, 1] == 163_008


def test_splitwise_table_is_fitted_and_says_how_well():
    loaded = load_coefficients(SPLITWISE_PERF_MODEL, "llama-2-70b", "a100")
    assert sorted(loaded.by_tp) == [2, 4, 8]
    assert 0 < loaded.fit_error < 0.1
    # Measured medians: 512 tokens on TP2 in 196 ms; a token at batch 1 in 55 ms.
    assert loaded.by_tp[2].prefill_ns([512]) == pytest.approx(196e6, rel=0.1)
    base, slope = loaded.by_tp[2].decode(1)
    assert base + 576 * slope == pytest.approx(55e6, rel=0.1)


def test_own_profile_recovers_the_coefficients_that_made_it(tmp_path):
    prefill = [(n, 900_000 + 13_000 * n + 2 * n * n) for n in (1, 64, 256, 1024, 4096)]
    decode = [
        (batch, context, 500_000 + 40 * context + 9_000 * batch)
        for batch in (1, 8, 64)
        for context in (batch * 10, batch * 500)
    ]
    path = tmp_path / "profile.json"
    document = {"profile": PROFILE, "model": "llama-3.1-8b"}
    path.write_text(
        json.dumps({**document, "runs": [{"tp": 1, "prefill": prefill, "decode": decode}]})
    )
    loaded = load_coefficients(path, "llama-3.1-8b", "h100")
    assert loaded.fit_error < 1e-6
    assert loaded.by_tp[1].prefill_ns([2000]) == pytest.approx(900_000 + 26_000_000 + 8_000_000)
    assert loaded.by_tp[1].decode(32) == (500_000 + 32 * 9_000, 40)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "neither a JSON profile nor a splitwise-sim"),
        ("{", "not JSON"),
        ("{}", "model: 'opt-13b' is not among"),
        ('{"facebook/opt-13b": {"1": {"prefill": [1, 2]}}}', "tp 1: not a DistServe profile"),
        (f'{{"profile": "{PROFILE}", "model": "x"}}', "model: it is of 'x', not 'opt-13b'"),
        (f'{{"profile": "{PROFILE}", "model": "opt-13b"}}', "runs: at least one is needed"),
        (
            f'{{"profile": "{PROFILE}", "model": "opt-13b", "runs": [{{"tp": 1}}]}}',
            "runs: not a blitzd-step-times/1 run: 'prefill'",
        ),
    ],
)
def test_bad_coefficient_files_are_refused(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        load_coefficients(path, "opt-13b", "a100")


def test_no_coefficient_comes_out_negative():
    x = np.linspace(1, 10, 20)
    features = np.column_stack([np.ones(20), x, x**2])
    solution = nonnegative_lstsq(features, 5 * x - 0.1 * x**2)
    assert (solution >= 0).all() and solution[2] == 0


def test_roofline_moves_the_right_way():
    model, gpu = MODELS["llama-3.1-70b"], GPUS["h100"]
    four, eight = (RooflineSteps(Roofline(model, gpu, tp)) for tp in (4, 8))
    assert eight.prefill_ns([1000]) < four.prefill_ns([1000]) < 2 * eight.prefill_ns([1000])
    # A small batch is bound by reading 141 GB of weights: 13.2 ms on four cards at 80 %.
    weights_ns = model.weight_bytes / (4 * 3350e9 * 0.8) * 1e9
    assert weights_ns < four.decode(1)[0] < 1.35 * weights_ns
    assert four.decode(1024)[0] > 1.5 * four.decode(1)[0]
    prompt, mixed = four.prefill_ns([512]), four.mixed_ns([(512, 0)], 32, 32_000)
    assert prompt < mixed < prompt + sum(four.decode(32)) + 32_000 * four.decode(32)[1]
    whole = four.mixed_ns([(2048, 0)], 0, 0)
    assert whole == pytest.approx(four.prefill_ns([2048]), abs=2)
