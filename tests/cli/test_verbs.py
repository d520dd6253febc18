"""The operator's verbs and `status`, over the admin API of a node that decides for real."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blitzd.cli import status, verbs
from blitzd.cli.admin_client import Where
from blitzd.events import types as ev
from blitzd.node.face import Drain, GoLive, Restart
from blitzd.node.paths import publish_admin_socket
from tests.cli.operated_node import OperatedNode, soon
from tests.control.harness import MS, Harness
from tests.http.served import Served, served


@pytest.fixture
def node() -> OperatedNode:
    return OperatedNode("prefill", "decode", "decode", "spare")


@pytest.fixture
def server(node: OperatedNode) -> Iterator[Served]:
    with served(node) as running:
        yield running


def at(server: Served, json: bool = False) -> Where:
    return Where(admin=f"http://127.0.0.1:{server.where.admin_port}", json=json)


def run_one(world: Harness) -> None:
    """Request 1 decodes on r1."""
    world.arrive(1)
    world.first_token(1)
    world.imported(1)
    assert world.state.requests[1].target == "r1"


def exit_and_come_back(world: Harness, replica_id: str) -> None:
    epoch = world.replica(replica_id).epoch
    world.feed(ev.WorkerExited(replica_id, epoch, "exited with status 0"))
    world.attach(replica_id)
    if world.replica(replica_id).role != "spare":
        world.load(replica_id)


def test_status_shows_who_is_there_what_runs_and_what_is_wrong(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    node.act(run_one)
    node.feed(ev.DrainRequested("r1", node.world.now + 90_000 * MS))
    node.feed(ev.WorkerExited("r2", 1, "killed by SIGKILL"))
    assert status.status(where=at(server)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "queue  0 requests, 0 tokens"
    assert lines[2] == "open   0 queued, 0 prefilling, 0 relayed, 0 migrating, 1 decoding"
    table = {line.split()[0]: line for line in lines[6:]}
    assert table["r0"].split() == ["r0", "prefill", "Prefill", "1", "100", "30/30", "0/64", "0"]
    assert table["r1"].endswith("1         draining, 90 s left")
    assert "worker spawning, killed by SIGKILL" in table["r2"]


def test_status_says_what_nobody_serves(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "no prefill replica is ready: what needs one waits"
    assert status.status(where=at(server)) == 0
    assert said not in capsys.readouterr().out.splitlines()
    node.feed(ev.DrainRequested("r0", 0))
    assert status.status(where=at(server)) == 0
    assert said in capsys.readouterr().out.splitlines()


def test_status_as_json_is_the_state(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.status(where=at(server, json=True)) == 0
    assert json.loads(capsys.readouterr().out) == node.state()


def test_a_verb_says_what_was_decided_and_that_nothing_was(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.drain("r1", where=at(server)) == 0
    said = capsys.readouterr().out
    assert 'ShutdownStarted  replica="r1" epoch=1 reason="drain"' in said
    assert verbs.drain("r1", where=at(server)) == 0
    assert capsys.readouterr().out == "nothing to change\n"
    assert verbs.undrain("r1", where=at(server, json=True)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [event["type"] for event in answer["events"]] == ["NullReused"]
    assert answer["replica"]["state"] == "Decode"


def test_a_drain_waits_until_nothing_runs_there(node: OperatedNode, server: Served) -> None:
    node.act(run_one)
    timer = soon(server, lambda: node.act(lambda world: world.ended(1)))
    assert verbs.drain("r1", deadline=60, wait=True, timeout=20, where=at(server)) == 0
    timer.join()
    assert node.commands == [Drain("r1", 60.0)]
    assert node.world.replica("r1").state == "ShuttingNull"


def test_waiting_ends_with_its_deadline_and_says_what_is_left(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    node.act(run_one)
    assert verbs.drain("r1", wait=True, timeout=0.3, where=at(server)) == 1
    error = capsys.readouterr().err
    assert "not done within 0.3 s, and still under way: r1 is ShuttingDecode with 1" in error


def test_a_drain_that_another_operator_calls_off_does_not_succeed(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    node.act(run_one)
    timer = soon(server, lambda: node.feed(ev.UndrainRequested("r1")))
    assert verbs.drain("r1", wait=True, timeout=20, where=at(server)) == 1
    timer.join()
    assert "brought back meanwhile" in capsys.readouterr().err


def test_a_restart_waits_for_the_new_worker(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = soon(server, lambda: node.act(lambda world: exit_and_come_back(world, "r1")))
    assert verbs.restart("r1", wait=True, timeout=20, where=at(server)) == 0
    timer.join()
    told = capsys.readouterr().out
    assert 'WorkerStopped  replica="r1" epoch=1' in told
    assert 'RestartEnded  replica="r1" epoch=2' in told
    assert node.world.replica("r1").epoch == 2


def test_a_restart_that_is_given_up_fails_with_the_reason(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_long(world: Harness) -> None:
        world.feed(ev.WorkerExited("r1", 1, "exited with status 0"))
        world.after(ms=10**7)

    timer = soon(server, lambda: node.act(too_long))
    assert verbs.restart("r1", wait=True, timeout=20, where=at(server)) == 1
    timer.join()
    assert "not back after" in capsys.readouterr().err


def test_a_rolling_restart_waits_for_all(node: OperatedNode, server: Served) -> None:
    def go_on(world: Harness) -> None:
        for _ in range(20):
            world.after(ms=50)
            for replica in list(world.state.replicas.values()):
                if replica.worker == "stopping":
                    exit_and_come_back(world, replica.id)
                elif replica.state.startswith("Loading"):
                    world.load(replica.id)

    timer = soon(server, lambda: node.act(go_on))
    assert verbs.restart(all=True, deadline=5, wait=True, timeout=20, where=at(server)) == 0
    timer.join()
    assert node.commands == [Restart("", 5.0)]
    assert {r.epoch for r in node.world.state.replicas.values()} == {2}


def test_a_restart_of_all_can_be_stopped(node: OperatedNode, server: Served) -> None:
    assert verbs.restart(all=True, where=at(server)) == 0
    assert verbs.restart(stop=True, where=at(server)) == 0
    assert not node.world.state.node.rolling


def test_scale_keeps_the_role_that_is_not_named(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.scale(decode=1, wait=True, timeout=20, where=at(server, json=True)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["events"][0]["payload"] == {"prefill": 1, "decode": 1}
    assert answer["waited_s"] < 5
    timer = soon(server, lambda: node.act(lambda world: world.load("r3")))
    assert verbs.scale(decode=3, wait=True, timeout=20, where=at(server)) == 0
    timer.join()


def test_scale_says_who_could_serve_and_is_drained(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.drain("r2", where=at(server)) == 0
    assert verbs.scale(decode=2, wait=True, timeout=0.3, where=at(server)) == 1
    error = capsys.readouterr().err
    assert "1 of 2 decode, 1 of 1 prefill; r2 is drained, which scaling does not bring" in error


def test_scale_can_name_who_goes(node: OperatedNode, server: Served) -> None:
    assert verbs.scale(remove="r2", wait=True, timeout=20, where=at(server)) == 0
    assert node.world.replica("r2").role == "spare"


def test_mutate_waits_for_the_role(node: OperatedNode, server: Served) -> None:
    assert verbs.mutate("r2", "prefill", wait=True, timeout=20, where=at(server)) == 0
    assert node.world.replica("r2").state == "Prefill"


def test_live_waits_until_both_are_prefill_replicas(node: OperatedNode, server: Served) -> None:
    timer = soon(server, lambda: node.act(end_pair))
    assert verbs.live("r3", old="r0", wait=True, timeout=20, where=at(server)) == 0
    timer.join()
    assert node.commands == [GoLive("r3", "r0")]
    assert {node.world.replica(r).state for r in ("r0", "r3")} == {"Prefill"}


def end_pair(world: Harness) -> None:
    world.feed(ev.LoadMoved("r3", 1, 0, 30, 1, 1000, "r1", 64, 64))
    world.load("r3")
    world.feed(ev.FollowEnded(world.replica("r3").pair_id, "r0", 1, 0))


def test_a_pair_that_breaks_is_no_success_and_says_why(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = soon(server, lambda: node.feed(ev.WorkerExited("r0", 1, "killed by SIGKILL")))
    assert verbs.live("r3", old="r0", wait=True, timeout=20, where=at(server)) == 1
    timer.join()
    assert "blitzd live: replica r0 was lost" in capsys.readouterr().err


def test_status_shows_pairs(
    node: OperatedNode, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    node.feed(ev.LivePairRequested("r3", "r0"))
    assert status.status(where=at(server)) == 0
    pair = "pair 1  r3 serves while it loads, r0 finishes for it"
    assert f"{pair}, which does not follow yet  0 requests pending" in capsys.readouterr().out
    node.act(lambda world: world.moved("r3"))
    node.act(lambda world: world.arrive(1))
    assert status.status(where=at(server)) == 0
    assert f"{pair}  1 requests pending" in capsys.readouterr().out


def test_the_policy_is_shown_and_changed(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verbs.policy(where=at(server)) == 0
    assert "drain_ms               600000  (1 to 86400000)" in capsys.readouterr().out
    assert verbs.policy("drain_ms=5000", "mutate_after_load=1", where=at(server)) == 0
    assert '["drain_ms", 600000, 5000]' in capsys.readouterr().out


def test_a_preset_changes_the_policy_by_the_originals_names(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = "impl_sllm,cache_replace"
    assert verbs.policy("drain_ms=5000", preset=wanted, where=at(server)) == 0
    shown = capsys.readouterr().out
    assert '["drain_ms", 600000, 5000]' in shown and '["ladder_map", 1, 0]' in shown
    assert verbs.policy(preset="blitzd", where=at(server)) == 0
    assert '["ladder_map", 0, 1]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "says", "code"),
    [
        (lambda where: verbs.drain("r9", where=where), 'no replica "r9"; there are r0', 1),
        (lambda where: verbs.mutate("r0", "colocated", where=where), "it is Prefill", 1),
        (lambda where: verbs.scale(prefill=9, where=where), "no more than the 4 replicas", 2),
        (lambda where: verbs.policy("drain_ms=0", where=where), "from 1 to 86400000", 2),
        (lambda where: verbs.policy("drain_ns=1", where=where), "did you mean drain_ms?", 2),
        (lambda where: verbs.policy("drain_ms", where=where), "accepted: name=integer", 2),
        (lambda where: verbs.policy(preset="ngrok", where=where), "opens a tunnel", 2),
        (lambda where: verbs.policy(preset="impl_slm", where=where), "no such preset", 2),
        (lambda where: verbs.scale(where=where), "--prefill and --decode, --remove or --auto", 2),
        (lambda where: verbs.restart("r0", all=True, where=where), "or give --all or --stop", 2),
        (lambda where: verbs.restart(where=where), "name a replica", 2),
        (lambda where: verbs.drain("../x", where=where), "no replica", 1),
        (lambda where: verbs.live("r3", old="x", where=where), 'no replica "x"; there are r0', 1),
        (lambda where: verbs.live("r1", old="r0", where=where), "an inactive one can go live", 1),
        (lambda where: verbs.live("r3", old="r1", where=where), "a Prefill can finish", 1),
    ],
)
def test_what_is_refused_is_said_and_is_no_success(
    server: Served, capsys: pytest.CaptureFixture[str], verb: Any, says: str, code: int
) -> None:
    assert verb(at(server)) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err


# Where the daemon is.


def test_it_is_found_by_its_state_directory(
    tmp_path: Path, node: OperatedNode, capsys: pytest.CaptureFixture[str]
) -> None:
    # Longer than the path of a socket may be.
    state_dir = tmp_path / ("s" * 120)
    state_dir.mkdir()
    with served(node, admin_socket=publish_admin_socket(state_dir)):
        assert verbs.drain("r1", where=Where(state_dir=state_dir)) == 0
    assert node.commands == [Drain("r1")]
    assert verbs.drain("r1", where=Where(state_dir=state_dir)) == 1
    assert "no daemon answers" in capsys.readouterr().err


def test_without_a_daemon_it_says_how_to_start_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.status(where=Where(state_dir=tmp_path)) == 1
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert "`blitzd up`" in error
    assert status.status(where=Where(admin="http://127.0.0.1:1")) == 1
    assert status.status(where=Where(admin="127.0.0.1:11237")) == 2


@pytest.mark.parametrize(
    "verb", ["status", "scale", "drain", "undrain", "restart", "mutate", "live"]
)
def test_each_verb_explains_itself(verb: str) -> None:
    argv = [sys.executable, "-m", "blitzd", verb, "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "--state-dir" in done.stdout
    assert "--json" in done.stdout
