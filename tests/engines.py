"""A model with its cache and the smallest loop that serves it: no scheduler, no worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from blitzd.engine.arena import Arena
from blitzd.engine.attention import TorchAttention
from blitzd.engine.batch import BatchLayout
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.llama import Llama

# Threads that spin at barriers starve each other on a shared machine.
torch.set_num_threads(1)


@dataclass
class Sequence:
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    computed: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_tokens


class Engine:
    """Over one prepared directory. `splits` cuts every step into layer ranges."""

    def __init__(
        self, directory: Path, blocks: int = 64, block_tokens: int = 16, *, copy: bool = False
    ) -> None:
        self.arena = Arena.open(directory, "copy" if copy else "map")
        config = self.arena.config
        geometry = KvGeometry.of(config, blocks, block_tokens)
        self.cache = KvCache(geometry, bytearray(geometry.bytes))
        self.attention = TorchAttention(self.cache, config.heads, config.sliding_window)
        self.model = Llama(config, self.arena, self.attention)
        self.splits: tuple[int, ...] = ()

    def step(self, batch: BatchLayout, ids: list[int]) -> torch.Tensor:
        """Hidden states of every row after all layers."""
        self.attention.plan(batch)
        hidden = self.model.embed(ids)
        for first, last in pairwise([0, *self.splits, self.arena.config.layers]):
            hidden = self.model.run_layers(hidden, batch.positions(), first, last)
        return hidden

    def generate(self, sequences: list[Sequence], chunk: int = 1 << 30) -> None:
        """Greedy, all together: prompts in chunks of `chunk` tokens, decodes beside them.
        Blocks are given out in turns, so that tables are scattered."""
        geometry = self.cache.geometry
        free = list(range(geometry.blocks))
        while running := [s for s in sequences if not s.done]:
            news = [s.ids[s.computed : s.computed + chunk] for s in running]
            for sequence, new in zip(running, news, strict=True):
                while len(sequence.table) * geometry.block_tokens < sequence.computed + len(new):
                    sequence.table.append(free.pop(0))
            batch = BatchLayout(
                [len(new) for new in news],
                [s.computed + len(new) for s, new in zip(running, news, strict=True)],
                [s.table for s in running],
            )
            hidden = self.step(batch, [i for new in news for i in new])
            tokens = self.model.logits(hidden[batch.last_rows()]).argmax(-1).tolist()
            for sequence, new, token in zip(running, news, tokens, strict=True):
                sequence.computed += len(new)
                if sequence.computed == len(sequence.ids):
                    sequence.output.append(token)
