"""How soon a spare answers, and what it adds: `python benchmarks/bench_spare.py [ROUNDS]`.

A real daemon with a prefill, a decode and a spare replica, whose worker stands by without KV.
Each round scales prefill to two while a request waits: the spare maps the node's file, checks
it, makes its KV cache and computes the prompt. Time is the log's, from the event that decides
to the input that says the first token is out. So that the request waits for the spare and for
nobody else, the first prefill replica is stopped meanwhile, with a request that fills its one
grant; so it takes no core either.

Added memory is that of all workers together, by proportional share (a mapped file counts once),
without what is shared memory: that is KV.
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

MIB = 1 << 20
PROMPT = "The history of the city begins long before its walls were built, when"
READY_S = 120.0
ROUND_S = 30.0
AIM_MS, AIM_MIB = 150, 64
OPTIONS = (
    *("--prefill", "1", "--decode", "1", "--spare", "1", "--dtype", "bfloat16", "--kv-mib", "64"),
    *("--set", "policy.null_ttl_ms=1", "--set", "policy.max_prefills_per_replica=1"),
    # The first replica is stopped on purpose.
    *("--set", "limits.hang_deadline_s=60"),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Daemon:
    def __init__(self, directory: Path) -> None:
        self.api, self.admin = free_port(), free_port()
        ports = ("--port", str(self.api), "--admin-port", str(self.admin))
        self._output = (directory / "out").open("wb")
        argv = [sys.executable, "-m", "blitzd", "up", "--state-dir", str(directory / "state")]
        argv += [*ports, *OPTIONS]
        self.process = subprocess.Popen(argv, stdout=self._output, stderr=self._output)

    def ask(self, port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ROUND_S) as answer:
            found: bytes = answer.read()
            return found

    def complete(self) -> None:
        body = {"model": "smollm2-135m", "prompt": PROMPT, "max_tokens": 4}
        self.ask(self.api, "/v1/completions", body)

    def replicas(self) -> dict[str, dict[str, Any]]:
        shown = json.loads(self.ask(self.admin, "/admin/state"))
        return {replica["id"]: replica for replica in shown["replicas"]}

    def seq(self) -> int:
        return int(json.loads(self.ask(self.admin, "/admin/state"))["seq"])

    def events(self, since: int) -> list[dict[str, Any]]:
        raw = self.ask(self.admin, f"/admin/events?since={since}&limit=10000")
        return [json.loads(line) for line in raw.splitlines() if line.strip()]

    def scale(self, **body: Any) -> None:
        self.ask(self.admin, "/admin/scale", body)

    def until(self, what: str, states: dict[str, str], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                found = {r: v["state"] for r, v in self.replicas().items() if r in states}
            except (OSError, urllib.error.URLError):
                found = {}
            if found == states:
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise SystemExit(f"{what}: {found} after {limit_s} s, wanted {states}")
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._output.close()


def used_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        fields = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        )
        kib = [int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_File")]
        total += sum(kib) << 10
    return total


def phases(events: list[dict[str, Any]], replica: str) -> dict[str, float]:
    """Milliseconds from the decision: load begun, layers, load over, prompt begun, token."""
    at: dict[str, int] = {}
    for event in events:
        payload = event["payload"]
        named = payload.get("replica", payload.get("source", ""))
        if named == replica:
            at.setdefault(event["type"], event["mono_ns"])
    steps = ("LoadStarted", "LoadProgressed", "LoadFinished", "PrefillStarted")
    begin = at["RoleAssigned"]
    return {name: (at[name] - begin) / 1e6 for name in (*steps, "FirstTokenProduced")}


def one_round(daemon: Daemon) -> tuple[dict[str, float], int]:
    before = daemon.replicas()
    pids = [replica["pid"] for replica in before.values()]
    used, since = used_bytes(pids), daemon.seq()
    os.kill(before["r0"]["pid"], signal.SIGSTOP)
    clients = [threading.Thread(target=daemon.complete) for _ in range(2)]
    try:
        clients[0].start()
        time.sleep(0.1)
        clients[1].start()
        time.sleep(0.1)
        daemon.scale(prefill=2, decode=1)
        clients[1].join(ROUND_S)
        added = used_bytes(pids) - used
    finally:
        os.kill(before["r0"]["pid"], signal.SIGCONT)
    clients[0].join(ROUND_S)
    found = phases(daemon.events(since), "r2")
    daemon.scale(remove="r2")
    daemon.until("the spare to give its weights up", {"r2": "Inactive"}, ROUND_S)
    return found, added


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        daemon = Daemon(Path(directory))
        try:
            daemon.until("ready", {"r0": "Prefill", "r1": "Decode", "r2": "Inactive"}, READY_S)
            daemon.complete()
            found = [one_round(daemon) for _ in range(rounds)]
        finally:
            daemon.stop()
    print(f"{rounds} rounds, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name in found[0][0]:
        times = sorted(step[name] for step, _ in found)
        median = statistics.median(times)
        print(f"{name:<20} median {median:7.1f} ms  least {times[0]:7.1f}  most {times[-1]:7.1f}")
    added = [size / MIB for _, size in found]
    print(f"added besides KV: first {added[0]:.1f} MiB, median {statistics.median(added):.1f} MiB")
    print(f"aims: {AIM_MS} ms median, {AIM_MIB} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
