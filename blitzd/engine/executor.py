"""From a step's plan to its new tokens: the forward pass over the batch, and sampling."""

import time
from collections.abc import Sequence

import torch

from blitzd.engine.attention import Attention
from blitzd.engine.batch import BatchLayout
from blitzd.engine.generation import Generation
from blitzd.engine.llama import Llama
from blitzd.engine.sampler import sample
from blitzd.sched import StepPlan


class Executor:
    def __init__(self, model: Llama, attention: Attention, pace_layer_ms: float = 0.0) -> None:
        """`pace_layer_ms` is a floor under each layer's time, with the computation inside
        it, so that replicas that share a few cores scale as if each had its own."""
        self._model = model
        self._attention = attention
        self._pace_s = pace_layer_ms / 1e3

    @torch.inference_mode()
    def run(self, plan: StepPlan, sampling: Sequence[Generation]) -> list[int]:
        """One token for each of `sampling`, the generations of `plan.sampling` in order."""
        batch = BatchLayout(
            query_lens=[chunk.count for chunk in plan.chunks],
            context_lens=[chunk.start + chunk.count for chunk in plan.chunks],
            block_tables=[chunk.sequence.blocks for chunk in plan.chunks],
        )
        self._attention.plan(batch)
        tokens = [
            token
            for chunk in plan.chunks
            for token in chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
        ]
        positions = torch.tensor(batch.positions())
        hidden = self._run_layers(self._model.embed(tokens), positions)
        ends = [
            row for row, chunk in zip(batch.last_rows(), plan.chunks, strict=True) if chunk.samples
        ]
        if not ends:
            return []
        rows = hidden if len(ends) == len(tokens) else hidden[ends]
        logits = self._model.logits(rows)
        for row, generation in enumerate(sampling):
            if banned := generation.banned:
                logits[row, list(banned)] = -torch.inf
        return sample(
            logits,
            [generation.params for generation in sampling],
            [len(generation.sequence.tokens) for generation in sampling],
        )

    def _run_layers(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        layers = self._model.config.layers
        if not self._pace_s:
            return self._model.run_layers(hidden, positions, 0, layers)
        due = time.monotonic()
        for layer in range(layers):
            hidden = self._model.run_layers(hidden, positions, layer, layer + 1)
            due = max(due + self._pace_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        return hidden
