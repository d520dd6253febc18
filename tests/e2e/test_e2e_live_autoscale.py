"""A burst against a live daemon whose planner opens a pair by itself."""

import json
import subprocess
from pathlib import Path

import pytest

from blitzd.sim.data import AZURE_CODE_BURST
from tests.e2e.daemon import BLITZD, Daemon, blitzd_json, wait_for
from tests.e2e.live import events, tell

SETTINGS = {
    "policy.prefill_tokens_per_s": 100,
    "policy.scale_down_window_ms": 3000,
    "policy.arrival_window_ms": 3000,
    "policy.max_prefill": 2,
    "policy.max_prefills_per_replica": 2,
    "policy.ladder_live": 1,
    "policy.null_ttl_ms": 1000,
}
LOADS_FROM_PEERS = {"ladder_map": 0, "mock_transfer_ms": 8000}


@pytest.mark.slow
def test_what_is_scaled_up_in_a_burst_serves_while_it_loads(state_dir: Path) -> None:
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    daemon = Daemon(state_dir, "--autoscale", "--spare", "1", "--kv-mib", "128", *settings).start()
    try:
        daemon.ready()
        tell(daemon, "/admin/policy", LOADS_FROM_PEERS)
        since = daemon.state()["seq"]
        played = subprocess.run(
            [
                *BLITZD,
                *("client", "--trace", str(AZURE_CODE_BURST), "--url", daemon.url, "--json"),
                *("--limit", "120", "--prompt-scale", "0.01", "--max-output", "4"),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        found = json.loads(played.stdout)
        assert (played.returncode, found["succeeded"], found["failed"]) == (0, 120, {})

        def back() -> bool:
            state, plan = daemon.state(), daemon.admin("/admin/plan")
            one_each = all(plan["roles"][role]["ready"] == 1 for role in ("prefill", "decode"))
            return one_each and not state["pairs"]

        wait_for("one replica of each role again", back, 60.0)
        opened = events(daemon, since, "PairOpened")
        settled = events(daemon, since, "PairSettled")
        relays = [e["payload"]["layers"] for e in events(daemon, since, "RequestRelayed")]
    finally:
        daemon.end()
    print(f"{len(opened)} pairs, {len(settled)} settled; relays after layers {sorted(relays)}")
    assert opened and settled
    assert any(0 < layers < 30 for layers in relays)
    assert blitzd_json("replay", str(state_dir), "--redecide")["difference"] is None
