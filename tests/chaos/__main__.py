"""`python -m tests.chaos [--nodes | --pairs] --seeds N [--first S]` or `--seed S --verbose`."""

import argparse
import logging
import sys
import time
import traceback
from collections import Counter

import structlog

from tests.chaos.nodes_world import NodesWorld
from tests.chaos.world import PairsWorld, World, run_seed

OF_PAIRS = (
    "PairOpened",
    "PairSettled",
    "PairBroken",
    "FollowStopped",
    "RequestRelayed",
    "RequestReturned",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--nodes", action="store_true", help="with agents on other nodes")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--pairs", action="store_true", help="live pairs in every run")
    args = parser.parse_args()
    if not args.verbose:
        quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
        structlog.configure(wrapper_class=quiet)
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else [args.seed]
    kind: type[World] = World
    options = ""
    if args.nodes:
        kind, options = NodesWorld, " --nodes"
    elif args.pairs:
        kind, options = PairsWorld, " --pairs"
    started = time.perf_counter()
    failed, records, virtual_s = 0, 0, 0.0
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = run_seed(seed, args.verbose, kind)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc(limit=-4)
            again = f"python -m tests.chaos{options} --seed {seed} --verbose"
            print(f"seed={seed} failed; repeat with: {again}")
            failed += 1
        else:
            records += len(world.disk.records)
            seen.update(type(record.payload).__name__ for record in world.disk.records)
            virtual_s += world.core.state.mono_ns / 1e9
    took = time.perf_counter() - started
    print(
        f"{len(seeds)} seeds, {failed} failed, {records} records,"
        f" {virtual_s:.0f} virtual s in {took:.1f} s"
    )
    print(", ".join(f"{seen[name]} {name}" for name in OF_PAIRS))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
