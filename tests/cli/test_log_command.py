"""`blitzd log` as an operator and a script meet it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blitzd.cli.log import app
from blitzd.events import (
    LogWriter,
    Payload,
    Record,
    Snapshot,
    apply_retention,
    types as ev,
    write_snapshot,
)
from blitzd.fsm import ClusterState, fold

HISTORY: list[Payload] = [
    ev.RequestArrived(1, 12, 64, 7, 0),
    ev.NodeDraining("maintenance – é", 5),
    *(ev.ReplicaRegistered(f"p{i}", "node-é", "prefill") for i in range(20)),
    ev.StaleNoticeIgnored("drained", "p0", 0),
]


def write(directory: Path, payloads: list[Payload]) -> None:
    writer = LogWriter.open(directory / "log", segment_bytes=800)
    for payload in payloads:
        seq = writer.last_seq + 1
        writer.append([Record(seq, 1_764_435_600_123_456_789, seq * 10, seq - 1, payload)])
        writer.sync()
    writer.close()


@pytest.fixture
def state_directory(tmp_path: Path) -> Path:
    write(tmp_path, HISTORY)
    return tmp_path


class Answer:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*tokens: object) -> Answer:
        with pytest.raises(SystemExit) as end:
            app([str(token) for token in tokens])
        out, err = capsys.readouterr()
        return Answer(end.value.code, out, err)  # type: ignore[arg-type]

    return call


def folded_hash() -> str:
    state = ClusterState()
    for seq, payload in enumerate(HISTORY, 1):
        fold(state, Record(seq, 0, seq * 10, seq - 1, payload))
    return state.hash()


def damage(directory: Path, segment: int, offset: int) -> Path:
    path = sorted((directory / "log").glob("*.log"))[segment]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("where", [".", "log"])
def test_verify_gives_the_state_hash(state_directory: Path, log: Any, where: str) -> None:
    answer = log("verify", state_directory / where, "--json")
    assert answer.code == 0
    found = answer.json
    assert found["ok"] is True
    assert (found["first_seq"], found["last_seq"], found["records"]) == (1, 23, 23)
    assert found["hash"] == folded_hash()
    assert found["problems"] == []
    assert found["segments"] > 2


def test_verify_names_file_offset_and_loss(state_directory: Path, log: Any) -> None:
    path = damage(state_directory, 1, -9)
    answer = log("verify", state_directory, "--json")
    assert answer.code == 1
    found = answer.json
    assert (found["ok"], found["hash"]) == (False, None)
    assert found["problems"][0]["file"] == str(path)
    assert found["problems"][0]["offset"] > 100
    lost = found["problems"][0]["first_lost"]
    assert found["problems"][0]["last_good"] == lost - 1
    assert f"records from {lost} on" in log("verify", state_directory).out


def test_verify_of_a_torn_end_is_not_a_problem(state_directory: Path, log: Any) -> None:
    path = sorted((state_directory / "log").glob("*.log"))[-1]
    path.write_bytes(path.read_bytes()[:-3])
    found = log("verify", state_directory, "--json").json
    assert found["ok"] is True
    assert found["last_seq"] == 22
    assert found["torn_bytes"] > 50
    assert "the next start cuts them off" in log("verify", state_directory).out


def test_verify_names_the_record_that_the_state_refuses(tmp_path: Path, log: Any) -> None:
    write(tmp_path, [*HISTORY, ev.WorkerSpawning("p99", 1)])
    answer = log("verify", tmp_path, "--json")
    assert answer.code == 1
    assert "record 24 does not fit" in answer.json["problems"][0]["reason"]


def test_verify_compares_the_hashes_in_the_log(tmp_path: Path, log: Any) -> None:
    write(tmp_path, [*HISTORY, ev.StateHashed(folded_hash())])
    assert log("verify", tmp_path).code == 0
    write(tmp_path, [ev.StateHashed("0" * 64)])
    answer = log("verify", tmp_path, "--json")
    assert answer.code == 1
    assert "record 25 says that the state's hash was 000" in answer.json["problems"][0]["reason"]


def test_verify_after_retention_knows_no_hash(state_directory: Path, log: Any) -> None:
    for seq in (15, 20):
        write_snapshot(state_directory / "log", Snapshot(seq, "h", b"s"))
    assert apply_retention(state_directory / "log")
    found = log("verify", state_directory, "--json").json
    assert (found["ok"], found["hash"], found["snapshots"]) == (True, None, [15, 20])
    for path in (state_directory / "log").glob("*.snap"):
        path.write_bytes(path.read_bytes()[:-1])
    answer = log("verify", state_directory, "--json")
    assert answer.code == 1
    reasons = [problem["reason"] for problem in answer.json["problems"]]
    assert sum("damaged snapshot" in reason for reason in reasons) == 2
    assert any("no snapshot covers" in reason for reason in reasons)


def test_cat_prints_one_record_a_line(state_directory: Path, log: Any) -> None:
    lines = log("cat", state_directory).out.splitlines()
    assert len(lines) == 23
    assert lines[1].split()[:3] == ["2", "2025-11-29T17:00:00.123456Z", "NodeDraining"]
    assert "<-1" in lines[1]
    assert "reason='maintenance – é'" in lines[1]


def test_cat_selects(state_directory: Path, log: Any) -> None:
    answer = log("cat", state_directory, "--from", 5, "--until", 7, "--json")
    assert [json.loads(line)["seq"] for line in answer.out.splitlines()] == [5, 6, 7]
    answer = log("cat", state_directory, "--type", "NodeDraining", "--type", "RequestArrived")
    assert [line.split()[0] for line in answer.out.splitlines()] == ["1", "2"]


def test_export_is_the_documented_form(state_directory: Path, tmp_path: Path, log: Any) -> None:
    target = tmp_path / "log.jsonl"
    summary = log("export", state_directory, "--output", target, "--json").json
    assert summary == {"records": 23, "first_seq": 1, "last_seq": 23, "file": str(target)}
    lines = target.read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[1]) == {
        "seq": 2,
        "wall_ns": 1_764_435_600_123_456_789,
        "mono_ns": 20,
        "kind": "event",
        "type": "NodeDraining",
        "cause": 1,
        "payload": {"reason": "maintenance – é", "deadline_ns": 5},
    }
    assert json.loads(lines[0])["kind"] == "input"
    assert log("export", state_directory).out.splitlines() == lines


def test_an_export_of_a_damaged_log_leaves_no_file_that_looks_whole(
    state_directory: Path, tmp_path: Path, log: Any
) -> None:
    damage(state_directory, 1, -9)
    answer = log("export", state_directory, "--output", tmp_path / "log.jsonl")
    assert answer.code == 1
    assert "would be lost" in answer.err
    assert not (tmp_path / "log.jsonl").exists()


def test_stats_count_by_type_and_segment(state_directory: Path, log: Any) -> None:
    found = log("stats", state_directory, "--json").json
    assert found["types"] == {
        "ReplicaRegistered": 20,
        "RequestArrived": 1,
        "NodeDraining": 1,
        "StaleNoticeIgnored": 1,
    }
    assert found["bytes"] == sum(segment["bytes"] for segment in found["segments"])
    assert found["segments"][0]["boot_epoch"] == 1
    assert "ReplicaRegistered" in log("stats", state_directory).out


def test_repair_of_a_torn_end(state_directory: Path, log: Any) -> None:
    assert "nothing to repair" in log("repair", state_directory).out
    path = sorted((state_directory / "log").glob("*.log"))[-1]
    torn = path.read_bytes()[:-3]
    path.write_bytes(torn)
    dry = log("repair", state_directory, "--dry-run", "--json").json
    assert (dry["last_seq"], dry["kept_as"]) == (22, [])
    assert dry["cut"]["file"] == str(path)
    assert path.read_bytes() == torn
    done = log("repair", state_directory, "--json").json
    (kept,) = done["kept_as"]
    assert path.read_bytes() + (path.parent / kept).read_bytes() == torn
    assert log("verify", state_directory, "--json").json["torn_bytes"] == 0


def test_repair_of_damage_needs_the_sequence(state_directory: Path, log: Any) -> None:
    damage(state_directory, 1, -9)
    refused = log("repair", state_directory)
    assert refused.code == 1
    lost = int(refused.err.rsplit("accept-loss ", 1)[1])
    assert log("repair", state_directory, "--accept-loss", lost + 1).code == 1
    assert log("repair", state_directory, "--accept-loss", lost, "--dry-run").code == 0
    assert log("verify", state_directory).code == 1
    assert log("repair", state_directory, "--accept-loss", lost).code == 0
    found = log("verify", state_directory, "--json").json
    assert (found["ok"], found["last_seq"]) == (True, lost - 1)


def test_repair_under_a_running_daemon_is_refused(state_directory: Path, log: Any) -> None:
    path = sorted((state_directory / "log").glob("*.log"))[-1]
    path.write_bytes(path.read_bytes()[:-3])
    daemon = LogWriter.open(state_directory / "log")
    path = sorted((state_directory / "log").glob("*.log"))[-1]
    path.write_bytes(path.read_bytes() + bytes(16))
    answer = log("repair", state_directory)
    assert answer.code == 1
    assert "is being written by process" in answer.err
    daemon.close()


@pytest.mark.parametrize("command", ["cat", "stats", "verify", "repair", "export"])
def test_a_directory_without_a_log(tmp_path: Path, log: Any, command: str) -> None:
    answer = log(command, tmp_path)
    assert answer.code == 1
    assert "no log here" in answer.err
    assert log(command, tmp_path / "missing").code == 1


def test_a_reader_that_leaves_early_is_no_error(state_directory: Path) -> None:
    write(state_directory, [ev.ClientLeft(n) for n in range(3000)])
    code = "import sys; from blitzd.cli import main; sys.argv[0] = 'blitzd'; main()"
    command = [sys.executable, "-c", code, "log", "cat", str(state_directory)]
    cat = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert cat.stdout is not None and cat.stderr is not None
    assert cat.stdout.readline()
    cat.stdout.close()
    assert cat.wait(timeout=60) == 0
    assert cat.stderr.read() == b""
