"""A recorded burst against a live daemon: it scales up and back down by itself."""

import json
import subprocess
from pathlib import Path

import pytest

from blitzd.sim.data import AZURE_CODE_BURST
from tests.e2e.daemon import BLITZD, Daemon, blitzd_json, wait_for

SETTINGS = {
    "policy.prefill_tokens_per_s": 300,
    "policy.scale_down_window_ms": 3000,
    "policy.arrival_window_ms": 3000,
    "policy.max_prefill": 3,
}


@pytest.mark.slow
def test_a_burst_scales_up_and_back_down_and_every_request_is_answered(state_dir: Path) -> None:
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    daemon = Daemon(state_dir, "--autoscale", "--spare", "3", "--kv-mib", "256", *settings).start()
    try:
        daemon.ready()
        played = subprocess.run(
            [
                *BLITZD,
                *("client", "--trace", str(AZURE_CODE_BURST), "--url", daemon.url, "--json"),
                *("--limit", "150", "--prompt-scale", "0.03", "--max-output", "12"),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        found = json.loads(played.stdout)
        print(json.dumps(found))
        assert (played.returncode, found["succeeded"], found["failed"]) == (0, 150, {})
        roles = ("prefill", "decode")

        def back() -> bool:
            plan = daemon.admin("/admin/plan")
            return all(plan["roles"][role]["ready"] == 1 for role in roles)

        wait_for("one replica of each role again", back, 60.0)
        plans = [e for e in daemon.events() if e["type"] == "PlanDecided"]
    finally:
        daemon.end()
    wanted = [plan["payload"]["wanted_prefill"] for plan in plans]
    print(wanted, [plan["payload"]["wanted_decode"] for plan in plans])
    assert max(wanted) >= 2
    assert wanted[-1] == 1
    for plan in plans:
        why = blitzd_json("replay", str(state_dir), "--plan", str(plan["seq"]))["facts"]["why"]
        assert all("→" in why[r] or why[r][0].isdigit() for r in roles), why
    again = blitzd_json("replay", str(state_dir), "--redecide")
    assert again["difference"] is None
