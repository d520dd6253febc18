import json
from pathlib import Path

import pytest

from blitzd.cli.sim import app
from blitzd.sched.zigzag import Policy
from blitzd.sim.errors import InputError
from blitzd.sim.zigzag import Shape, compare, read_trial, run_policy

SMALL = ["--layers", "8", "--layer-ms", "5", "--trials", "6", "--embedding", "2"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        app(["zigzag", *arguments])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_live_beats_best_effort_beats_stopping_the_world() -> None:
    """On the set-up that live measurements use: a layer arrives in six executions of it."""
    shape = Shape(30, 5_000_000, 6.0, 8.0, 1.75, capped=True)
    report, table = compare([shape.trial(seed) for seed in range(30)], {})
    mean = {row[0]: row[2] for row in table.rows}
    p99 = {row[0]: row[4] for row in table.rows}
    assert mean["ilp_free"] <= 0.75 and p99["ilp_free"] <= 0.85
    assert mean["ilp_free"] < mean["best_effort"] < mean["stop_the_world"] == 1
    embedding = report["embedding"]
    assert isinstance(embedding, dict) and 0 < embedding["share"] < 1


def test_the_same_seed_gives_the_same_report(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (json.loads(run(capsys, *SMALL, "--json")) for _ in range(2))
    assert first == second
    other = json.loads(run(capsys, *SMALL, "--json", "--seed", "9"))
    assert other["report_hash"] != first["report_hash"]
    assert [row["policy"] for row in first["policies"]] == [p.value for p in Policy]


def recorded(path: Path, **changes: object) -> Path:
    content = {
        "pair": 1,
        "ready_ns": [6 * k for k in range(7)],
        "requests": [{"arrival_ns": 0, "layer_ns": 1}] * 7,
    }
    path.write_text(json.dumps(content | changes))
    return path


def test_a_recorded_load_is_run_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, figure = recorded(tmp_path / "load.json"), tmp_path / "zigzag.png"
    files = ["--recorded", str(path), str(path)]
    out = run(capsys, *files, "--draw", "ilp_free", "--plot", str(figure))
    rows = [line for line in out.splitlines() if line[:7].strip().isdigit()]
    assert len(rows) == 7 and "O" in rows[0] and "n" not in rows[0]
    assert rows[2].count("n") and rows[2].rstrip().endswith("O")
    assert figure.stat().st_size > 10_000
    trial = read_trial(path, capped=False)
    assert run_policy(trial.pair, Policy.ILP_FREE).finish_ns[2] == 17


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pair": 2}, "pair: 2; accepted: 1"),
        ({"requests": []}, "requests: empty"),
        ({"ready_ns": [3, 1]}, "ascending"),
        ({"embedding_ns": 5}, "embedding_ns: 5; 0 to 0"),
        ({"requests": [{"arrival_ns": 0, "layer_ns": 0}]}, "layer_ns from 1"),
        ({"layers": 3}, "unknown field `layers`"),
    ],
)
def test_a_bad_recording_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = recorded(tmp_path / "load.json", **changes)
    with pytest.raises(InputError, match=message) as refused:
        read_trial(path, capped=True)
    assert str(path) in str(refused.value)
