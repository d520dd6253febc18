"""A live pair of replicas on different nodes: weights, hidden states and KV over the network."""

from pathlib import Path

import pytest

from tests.e2e.live import PACED, POLICY, answers, serve_through_a_pair
from tests.e2e.nodes import AgentDaemon, Authority, controller, until

NEW = "b.r0"


@pytest.mark.slow
def test_a_replica_of_another_node_serves_while_its_weights_arrive(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    settings = [*authority.settings("a"), *PACED, *POLICY]
    a, port = controller(tmp_path / "a", settings, decode=1)
    settings = [*authority.settings("b"), *PACED]
    b = AgentDaemon(tmp_path / "b", f"127.0.0.1:{port}", settings, role="spare")
    try:
        a.start()
        b.start()
        a.ready()
        until(a, NEW, lambda state: any(r["id"] == NEW for r in state["replicas"]))
        serve_through_a_pair(a, answers(a), load_ms=4000, new=NEW)
    finally:
        b.end()
        a.end()
