"""A node of two links takes the weights in as shards, and its replicas serve the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.nodes import AgentDaemon, Authority, controller, events_of, until
from tests.e2e.test_e2e_weights import scale, texts

LINKS = "topology.nodes={{a={{gbit_s=1,links={a}}},b={{gbit_s=1,links={b}}}}}"


def received(b: AgentDaemon, replica: str) -> dict[str, Any]:
    log = (b.state_dir / "workers" / f"{replica}-1.log").read_text().splitlines()
    [whole] = [json.loads(line) for line in log if '"weights received"' in line]
    return whole


@pytest.mark.slow
def test_two_spares_of_a_node_bring_half_of_the_weights_each(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    links = LINKS.format(a="['e0','e1','e2']", b="['e0','e1']")
    settings = [*authority.settings("a"), "--set", "policy.ladder_map=0", "--set", links]
    a, port = controller(tmp_path / "a", settings, decode=2)
    two = ["--set", "replicas.spare=2"]
    b = AgentDaemon(
        tmp_path / "b", f"127.0.0.1:{port}", [*authority.settings("b"), *two], role="spare"
    )
    try:
        a.start().ready()
        b.start()

        def there(state: dict[str, Any]) -> bool:
            spares = [r for r in state["replicas"] if r["node"] == "b"]
            return len(spares) == 2 and all(r["worker"] == "attached" for r in spares)

        until(a, "both spares", there)
        [expected] = texts(a, 1)
        scale(a, 1, 4)

        def serving(state: dict[str, Any]) -> bool:
            return sum(r["state"] == "Decode" for r in state["replicas"]) == 4

        until(a, "four decodes", serving)
        loads = {
            event["payload"]["replica"]: event["payload"]
            for event in events_of(a, "LoadStarted")
            if event["payload"]["replica"].startswith("b.")
        }
        assert {load["rung"] for load in loads.values()} == {"shard"}
        assert {load["source"] for load in loads.values()} == {"r1", "r2"}
        for replica, load in loads.items():
            whole = received(b, replica)
            [neighbour] = loads.keys() - {replica}
            assert set(whole["taken"]) == {f"{load['source']}/1", f"{neighbour}/1"}
            assert sum(whole["taken"].values()) == whole["bytes"]
        assert texts(a, 16) == {expected}
    finally:
        b.end()
        a.end()
