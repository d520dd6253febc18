"""`blitzd bench engine`: what it measures, and that the simulator takes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blitzd.cli import bench as command
from blitzd.engine import bench
from blitzd.engine.bench import BenchPlan, measure
from blitzd.engine.options import ReplicaOptions, Weights
from blitzd.sim.coefficients import load_coefficients
from tests.tiny import make_tiny

PLAN = BenchPlan(batches=(1, 3), contexts=(2, 70), prompts=(1, 64, 90), rounds=2, steps=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bench") / "tiny", context_tokens=256)


@pytest.mark.parametrize("weights", ["map", "copy"])
def test_every_point_is_measured_at_its_size(
    model: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[int, int]] = []
    one = bench.StepBench._step

    def seen(self: bench.StepBench, tokens: int) -> int:
        took = one(self, tokens)
        steps.append((tokens, self._stepper.occupancy.running))
        return took

    monkeypatch.setattr(bench.StepBench, "_step", seen)
    measured = measure(model, PLAN, ReplicaOptions(weights=weights))
    assert [(point.batch, point.tokens, point.made) for point in measured.decode] == [
        (1, 4, 1), (1, 72, 1), (3, 12, 3), (3, 216, 3)
    ]  # fmt: skip
    assert [(point.batch, point.tokens, point.made) for point in measured.prefill] == [
        (0, 1, 1), (0, 64, 64), (0, 90, 90)
    ]  # fmt: skip
    assert all(0 < p.best_ns <= p.ns for p in measured.decode + measured.prefill)
    turn = [(1, 0), (64, 0), (90, 0)] + [(1, 1)] * 8 + [(3, 3)] * 8
    assert steps == [(1, 0), *turn, *turn], "a warm-up, then every point in each round"
    assert measured.conditions["weights"] == weights


def test_nothing_is_left_in_the_cache_between_points(model: Path) -> None:
    """The largest point needs all the blocks that there are."""
    arena = bench.Arena.open(model)
    one = bench.StepBench(model, arena, PLAN, ReplicaOptions())
    for _ in range(3):
        one.prefill(90)
        assert len(one.decode(3, 70)) == PLAN.steps
        assert one._stepper.occupancy.blocks_used == 0
        one._stepper.audit()


def test_the_simulator_loads_the_profile_that_the_command_writes(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command.catalogue, "resolve", Path)
    monkeypatch.setattr(command, "prepare", lambda *_: model)
    out = tmp_path / "profile.json"
    sizes = {"batch": (1, 2, 4), "context": (16, 64), "prompt": (8, 32, 128)}
    assert command.engine("smollm2-135m", rounds=1, steps=1, out=out, **sizes) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and str(out) in printed
    document = json.loads(out.read_text())
    (run,) = document["runs"]
    assert all(type(number) is int for row in run["prefill"] + run["decode"] for number in row)
    assert document["dtype"] == "float32" and document["threads"] == 1
    assert sum(load_coefficients(out, "smollm2-135m", "cpu").by_tp[1].decode(2)) > 0
    assert command.engine("smollm2-135m", rounds=1, steps=1, json=True, **sizes) == 0
    assert json.loads(capsys.readouterr().out)["profile"] == document["profile"]


def test_the_simulator_finds_the_coefficients_in_the_profile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that take what three coefficients say are fitted with those: tokens, contexts and
    batches stand where the loader looks for them."""

    def prefill(self: bench.StepBench, tokens: int) -> int:
        return 900_000 + 13_000 * tokens + 2 * tokens**2

    def decode(self: bench.StepBench, batch: int, context: int) -> list[int]:
        times = [500_000 + 9_000 * batch + 40 * batch * (context + n) for n in (1, 2, 3)]
        return times[::-1]

    monkeypatch.setattr(bench.StepBench, "prefill", prefill)
    monkeypatch.setattr(bench.StepBench, "decode", decode)
    out = tmp_path / "profile.json"
    profile = measure(model, PLAN, ReplicaOptions(), "tiny").profile()
    out.write_text(json.dumps(profile))
    loaded = load_coefficients(out, "tiny", "cpu")
    assert loaded.fit_error < 1e-6
    assert loaded.by_tp[1].prefill_ns([200]) == 900_000 + 2_600_000 + 80_000
    assert loaded.by_tp[1].decode(32) == (500_000 + 32 * 9_000, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": ()}, r"batches: \[\]; different numbers from 1"),
        ({"prompts": (8, 8, 9)}, r"prompts: \[8, 8, 9\]; different"),
        ({"contexts": (1, 2)}, "contexts: 1; at least a prompt's token"),
        ({"contexts": (2, 255)}, "contexts: 255 grows to 259 tokens here; .* has 256"),
        ({"prompts": (1, 2, 256)}, "prompts: 256 grows to 257 tokens here"),
        ({"prompts": (1, 2)}, "prompts: 2 points; a fit needs at least 3"),
        ({"batches": (1,)}, "batches x contexts: 2 points; a fit needs at least 3"),
        ({"rounds": 0}, "rounds: 0; must be at least 1"),
    ],
)
def test_plans_that_cannot_be_measured_are_refused(
    model: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure(model, replace(PLAN, **changes), ReplicaOptions())  # type: ignore[arg-type]


def test_the_command_says_what_is_wrong(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.engine("no-such-model") == 1
    assert "no-such-model" in capsys.readouterr().err
    monkeypatch.setattr(command.catalogue, "resolve", Path)
    monkeypatch.setattr(command, "prepare", lambda *_: model)
    assert command.engine("smollm2-135m", context=(8, 16)) == 1
    assert "prompts: 512 grows to 513 tokens here" in capsys.readouterr().err
