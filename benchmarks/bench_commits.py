"""What a change costs: this tree's daemon beside that of an earlier commit, in turns.

    .venv/bin/python benchmarks/bench_commits.py COMMIT [--pairs 10]

Both daemons run all the time, one prefill and one decode worker each; a pair gives each the
same requests, one daemon after the other, the order changing from pair to pair. Printed are
the medians over the pairs of after / before for throughput and for the daemon's own CPU time
a request, with the quartiles: seconds depend on the machine and on its other tenants.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_serving import Blitzd, job
from tests.e2e.daemon import Daemon

TREE = Path(__file__).resolve().parent.parent
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 16, 32, 48


class Sample(NamedTuple):
    tokens_per_s: float
    daemon_cpu_ms: float
    """A request."""


def cpu_s(pid: int) -> float:
    """Of the process's threads. In ns, unlike /proc/PID/stat, whose ticks are longer than what
    a request takes."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def sample(daemon: Daemon, pair: int) -> Sample:
    assert daemon.process is not None
    jobs = [job(1000 * pair + i, PROMPT_TOKENS, NEW_TOKENS) for i in range(REQUESTS)]
    before = cpu_s(daemon.process.pid)
    seconds = Blitzd(daemon).many(jobs)
    spent_ms = 1000 * (cpu_s(daemon.process.pid) - before)
    return Sample(REQUESTS * NEW_TOKENS / seconds, spent_ms / REQUESTS)


@contextmanager
def checkout(commit: str, scratch: Path) -> Iterator[Path]:
    tree = scratch / "before"
    git = ["git", "-C", str(TREE), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def report(what: str, ratios: list[float]) -> None:
    low, median, high = statistics.quantiles(ratios, n=4)
    print(f"{what}: after / before {median:.3f} (quartiles {low:.3f} to {high:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = {"before": stack.enter_context(checkout(options.commit, scratch)), "after": TREE}
        daemons = {}
        for name, tree in trees.items():
            daemons[name] = Daemon(scratch / f"state-{name}", "--spare", "0", tree=tree).start()
            stack.callback(daemons[name].end)
            daemons[name].ready()
            sample(daemons[name], 0)
        pairs = []
        for pair in range(1, options.pairs + 1):
            order = sorted(daemons, reverse=pair % 2 == 0)
            seen = {name: sample(daemons[name], pair) for name in order}
            pairs.append(seen)
            print(f"  pair {pair}: before {seen['before']}, after {seen['after']}", flush=True)
        for what in Sample._fields:
            report(what, [getattr(p["after"], what) / getattr(p["before"], what) for p in pairs])


if __name__ == "__main__":
    main()
