"""The ranks of an all-gather, forked from one process that has imported torch.

    python -m tests.fabric.gather_ranks BACKEND RANKS BYTES DIRECTORY

Each fills its shard of an arena, gathers, and compares all bytes; exits 0 when all do.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from blitzd.engine.coverage import shards
from blitzd.engine.layout import ALIGNMENT
from blitzd.fabric.gather import all_gather

LIMIT = timedelta(seconds=60)


def run(backend: str, rank: int, ranks: int, size: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=LIMIT
    )
    whole = torch.arange(size, dtype=torch.int64).mul_(2654435761).bitwise_right_shift_(7)
    whole = whole.to(torch.uint8).to(device)
    cuts = shards(size, ranks, ALIGNMENT)
    arena = torch.zeros(size, dtype=torch.uint8, device=device)
    start, end = cuts[rank]
    arena[start:end] = whole[start:end]
    all_gather(arena, cuts)
    same = torch.equal(arena, whole)
    try:
        all_gather(arena, cuts[:-1])
    except ValueError as error:
        same &= "ranges in a row" in str(error)
    else:
        same = False
    dist.destroy_process_group()
    if not same:
        raise SystemExit(f"rank {rank}: other bytes")


def main(backend: str, ranks: str, size: str, directory: str) -> int:
    children = []
    for rank in range(int(ranks)):
        child = os.fork()
        if child == 0:
            run(backend, rank, int(ranks), int(size), Path(directory) / "meeting")
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
