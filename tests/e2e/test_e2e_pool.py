"""A spare of another node keeps the weights for all, and the decode that comes back gets them
from there; what moved is in the state and in the metrics."""

import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.nodes import AgentDaemon, Authority, controller, events_of, until
from tests.e2e.test_e2e_weights import replicas, texts

LINKS = "topology.nodes={a={gbit_s=1,links=['e0','e1']},b={gbit_s=1,links=['e0']}}"


@pytest.mark.slow
def test_the_weights_come_from_the_memory_of_another_node(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    # The prefill beside it would give, too: inside a node nothing is in the way of its KV.
    moves = ("policy.ladder_map=0", "policy.ladder_nvlink=0", LINKS)
    settings = [*authority.settings("a"), *(word for one in moves for word in ("--set", one))]
    a, port = controller(tmp_path / "a", settings, decode=1)
    b = AgentDaemon(tmp_path / "b", f"127.0.0.1:{port}", authority.settings("b"), role="spare")
    try:
        a.start().ready()
        b.start()
        until(a, "the spare", lambda state: _worker(state, "b.r0") == "attached")
        [expected] = texts(a, 1)
        victim = a.replica("decode")
        os.kill(victim["pid"], signal.SIGKILL)

        def back(state: dict[str, Any]) -> bool:
            [now] = [r for r in state["replicas"] if r["id"] == victim["id"]]
            return now["state"] == "Decode" and now["pid"] != victim["pid"]

        until(a, "the decode's next life", back)
        assert texts(a, 4) == {expected}
        assert [e["payload"]["replica"] for e in events_of(a, "PoolCopyAssigned")] == ["b.r0"]
        load = events_of(a, "LoadStarted")[-1]["payload"]
        assert (load["replica"], load["rung"]) == (victim["id"], "pool")
        assert load["peers"] == [["b.r0", 1]]
        until(a, "the copy to go", lambda state: not _of(state, "b.r0")["pooled"])
        size = replicas(a)[victim["id"]]["bytes_total"]
        flows = {name: _of(a.state(), name)["flow"] for name in ("b.r0", victim["id"])}
        assert flows["b.r0"]["weights_out"] == {"bytes": size, "open": 0}
        assert flows[victim["id"]]["weights_in"]["bytes"] >= size
        with urllib.request.urlopen(f"{a.url}/metrics", timeout=10) as answer:
            samples = answer.read().decode().splitlines()
        [out] = [
            line
            for line in samples
            if line.startswith("blitzd_replica_flow_bytes_total{")
            and all(word in line for word in ('replica="b.r0"', '"out"', '"weights"'))
        ]
        assert float(out.rsplit(" ", 1)[1]) == size
        assert [node["node"] for node in a.state()["topology"]] == ["a", "b"]
    finally:
        b.end()
        a.end()


def _of(state: dict[str, Any], replica: str) -> dict[str, Any]:
    [found] = [r for r in state["replicas"] if r["id"] == replica]
    return dict(found)


def _worker(state: dict[str, Any], replica: str) -> str:
    """Nothing while its node has not joined."""
    return "".join(r["worker"] for r in state["replicas"] if r["id"] == replica)
