"""The all-gather of a sharded load between devices that have an arena each: NCCL over NVLink on
GPUs, gloo in its place on CPUs. (Workers of a CPU node copy out of each other's mapped arenas
instead, while the shards arrive: nothing moves twice there.)"""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_gather(
    arena: torch.Tensor, cuts: Sequence[tuple[int, int]], group: dist.ProcessGroup | None = None
) -> None:
    """Each rank's range of `arena`, [start, end) of `cuts` by rank, to all the others, in place.

    `arena` is uint8[bytes] on the group's device. All ranks call it with the same cuts: one
    after the other, of equal length but for the last, which may be longer. Raises ValueError.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    length = cuts[0][1] if cuts else 0
    starts = [start for start, _ in cuts]
    if len(cuts) != ranks or starts != [length * index for index in range(ranks)]:
        raise ValueError(f"cuts: {list(cuts)}; accepted: {ranks} ranges in a row, equally long")
    if length:
        mine = arena[length * rank : length * (rank + 1)]
        dist.all_gather_into_tensor(arena[: length * ranks], mine, group)
    rest = arena[length * ranks : cuts[-1][1]]
    if len(rest):
        dist.broadcast(rest, group=group, group_src=ranks - 1)
