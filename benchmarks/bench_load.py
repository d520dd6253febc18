"""How long the embedded model takes to load: the first time (a GGUF turned into a prepared
directory), every time after (mapped or copied), and what each way of holding weights costs.

    python benchmarks/bench_load.py [--rounds 5] [--dtype float32] [--steps]

Every load is in a process of its own, with its imports done before: a worker reads torch from
disk at its start, whatever it loads. The best wall time is what a quiet machine does; the CPU
time is printed beside it, since neighbours lengthen the first and not the second. `--steps`
times decode steps over mapped and over copied weights too, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blitzd.engine.catalogue import DEFAULT_MODEL, cache_root, prepared_dir, resolve
from blitzd.engine.options import ReplicaOptions, Weights
from blitzd.engine.prepare import prepare
from blitzd.engine.prepared import open_prepared
from blitzd.engine.replica import open_replica

HOW: tuple[Weights, ...] = ("map", "copy")


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
    }


def memory_mib() -> dict[str, int]:
    """Of this process: its own pages, and pages of files it has mapped."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {
        "own_mib": (kib["Private_Dirty"] + kib.get("Private_Hugetlb", 0)) >> 10,
        "huge_mib": kib["AnonHugePages"] >> 10,
        "rss_mib": kib["Rss"] >> 10,
    }


def load_first(dtype: str) -> dict[str, Any]:
    """GGUF to a replica that takes requests."""
    cache = Path(tempfile.mkdtemp(prefix=".bench-load-", dir=cache_root()))
    try:
        directory, prepared = timed(lambda: prepare(resolve(DEFAULT_MODEL), dtype, cache))
        return {"prepare": prepared, **load_again(directory, "map")}
    finally:
        shutil.rmtree(cache)


def load_again(directory: Path, how: Weights) -> dict[str, Any]:
    before = memory_mib()
    opened, opening = timed(lambda: open_prepared(directory, lambda progress: None, how))
    options = ReplicaOptions(weights=how)
    replica, starting = timed(
        lambda: open_replica(opened, 16, options, lambda report: None, lambda error: None)
    )
    after = memory_mib()
    replica.close(5.0)
    grown = {key: after[key] - before[key] for key in after}
    return {"open": opening, "start": starting, "memory": grown}


def child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def column(runs: list[dict[str, Any]], *parts: str) -> str:
    wall = [sum(run[part]["wall_s"] for part in parts) for run in runs]
    cpu = [sum(run[part]["cpu_s"] for part in parts) for run in runs]
    return (
        f"best {min(wall) * 1e3:6.0f} ms  median {statistics.median(wall) * 1e3:6.0f} ms  "
        f"CPU {min(cpu) * 1e3:6.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--child", nargs="+")
    options = parser.parse_args()
    if options.child:
        what, dtype = options.child
        if what == "first":
            print(json.dumps(load_first(dtype)))
        else:
            how: Weights = "copy" if what == "copy" else "map"
            directory = prepare(resolve(DEFAULT_MODEL), dtype, prepared_dir())
            print(json.dumps(load_again(directory, how)))
        return
    runs: dict[str, list[dict[str, Any]]] = {"first": [], "map": [], "copy": []}
    for _ in range(options.rounds):
        for what, found in runs.items():
            found.append(child(what, options.dtype))
    print(f"{DEFAULT_MODEL} as {options.dtype}, {options.rounds} rounds of turns, ", end="")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("first load  ", column(runs["first"], "prepare", "open", "start"))
    print("  of it prepare", column(runs["first"], "prepare"))
    for how in HOW:
        print(f"again, {how:<5}", column(runs[how], "open", "start"), end="  ")
        memory = runs[how][-1]["memory"]
        print(
            f"own memory +{memory['own_mib']} MiB ({memory['huge_mib']} on huge pages), "
            f"RSS +{memory['rss_mib']} MiB"
        )
    if options.steps:
        compare_steps(options.dtype)


def compare_steps(dtype: str) -> None:
    """Decode steps of one and of sixteen requests, one compute thread."""
    from blitzd.engine.bench import BenchPlan, measure

    directory = prepare(resolve(DEFAULT_MODEL), dtype, prepared_dir())
    # As few points as a profile may have.
    plan = BenchPlan((1, 16), (64, 128, 256), (64, 128, 256), rounds=1, steps=4)
    best: dict[tuple[str, str], int] = {}
    for _ in range(5):
        for how in HOW:
            found = measure(directory, plan, ReplicaOptions(weights=how))
            points = {"prefill 256": found.prefill[-1]}
            points |= {f"decode x{point.batch}": point for point in found.decode}
            for name, point in points.items():  # of the longest context
                best[name, how] = min(best.get((name, how), 1 << 62), point.best_ns)
    for name in ("prefill 256", "decode x1", "decode x16"):
        mapped, copied = best[name, "map"] / 1e6, best[name, "copy"] / 1e6
        print(f"{name:<12} map {mapped:7.2f} ms  copy {copied:7.2f} ms  {mapped / copied:.2f}x")


if __name__ == "__main__":
    main()
