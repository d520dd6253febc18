"""From a step's plan to its new tokens: the forward pass over the batch, and sampling.

A forward pass can be cut between any two layers (`run_range`), and taken up by another
executor that runs a plan of the same tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from blitzd.engine.attention import Attention
from blitzd.engine.batch import BatchLayout
from blitzd.engine.decode_graphs import DecodeGraphs
from blitzd.engine.finite import rows_not_finite, spoilt_chunks, told
from blitzd.engine.generation import Generation
from blitzd.engine.llama import Llama
from blitzd.engine.scoring import PromptScores, choose, score_prompts
from blitzd.sched import StepPlan


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: StepPlan
    batch: BatchLayout
    positions: torch.Tensor


class Outcome(NamedTuple):
    """Of a step."""

    tokens: list[int]
    """One for each chunk that samples, in order."""
    scores: list[PromptScores]
    spoilt: dict[int, str]
    """Ids of the sequences with numbers that are not finite, and where those are."""


class Executor:
    def __init__(
        self,
        model: Llama,
        attention: Attention,
        pace_layer_ms: float = 0.0,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`pace_layer_ms` is a floor under each layer's time, with the computation inside
        it, so that replicas that share a few cores scale as if each had its own. `graphs`,
        of the same model and attention, run steps of all layers."""
        self._model = model
        self._attention = attention
        self._pace_s = pace_layer_ms / 1e3
        self._graphs = graphs
        self._planned: _Planned | None = None

    @torch.inference_mode()
    def run(
        self,
        plan: StepPlan,
        sampling: Sequence[Generation],
        scoring: Sequence[Generation] = (),
    ) -> Outcome:
        """All layers of the plan's tokens, and what comes of them (`conclude`)."""
        hidden = self.run_range(plan, 0, self._model.config.layers)
        return self.conclude(plan, hidden, sampling, scoring)

    @torch.inference_mode()
    def run_range(
        self, plan: StepPlan, first: int, last: int, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Layers [first, last) of the plan's tokens: [rows, hidden], one row a token.

        `hidden` are the rows that layers [0, first) made of the same tokens, here or
        elsewhere; without them the tokens are embedded, so `first` is 0 then. The KV of
        layers [first, last) goes to this executor's cache, that of the others is not touched.
        Raises ValueError when `hidden` does not fit the plan.
        """
        if (hidden is None) != (first == 0):
            raise ValueError(
                f"layers [{first}, {last}): hidden states are needed, unless layer 0 is first"
            )
        planned = self._prepare(plan)
        if hidden is None:
            hidden = self._model.embed(
                [
                    token
                    for chunk in plan.chunks
                    for token in chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
                ]
            )
        elif hidden.shape != (planned.batch.rows, self._model.config.hidden):
            raise ValueError(
                f"hidden: shape {list(hidden.shape)}; this plan has "
                f"{[planned.batch.rows, self._model.config.hidden]}"
            )
        return self._run_layers(hidden, planned.positions, first, last)

    @torch.inference_mode()
    def conclude(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,
        sampling: Sequence[Generation],
        scoring: Sequence[Generation] = (),
    ) -> Outcome:
        """What comes of rows that all layers have seen. `sampling` are the generations of
        `plan.sampling`, in order; `scoring` those whose prompt tokens want logprobs."""
        spoilt = spoilt_chunks(plan, hidden)
        scores: list[PromptScores] = []
        sound = [generation for generation in scoring if generation.sequence.id not in spoilt]
        if sound:
            scores = score_prompts(self._model, plan, hidden, sound, spoilt)
        return Outcome(self._sample(plan, hidden, sampling, spoilt), scores, spoilt)

    def _sample(
        self,
        plan: StepPlan,
        hidden: torch.Tensor,
        sampling: Sequence[Generation],
        spoilt: dict[int, str],
    ) -> list[int]:
        ends, end = [], 0
        for chunk in plan.chunks:
            end += chunk.count
            if chunk.samples:
                ends.append(end - 1)
        if not ends:
            return []
        logits = self._model.logits(hidden if len(ends) == end else hidden[ends])
        for row in rows_not_finite(logits):
            sequence = sampling[row].sequence
            last = len(sequence.tokens)
            spoilt.setdefault(sequence.id, told("logits", last - 1, last))
            logits[row] = 0.0  # a token that nobody gets
        return choose(logits, sampling)

    def _prepare(self, plan: StepPlan) -> _Planned:
        """Plans the attention, unless it is planned for just this: the ranges of one step
        mostly follow each other."""
        planned = self._planned
        if planned is None or planned.plan is not plan:
            batch = BatchLayout(
                query_lens=[chunk.count for chunk in plan.chunks],
                context_lens=[chunk.start + chunk.count for chunk in plan.chunks],
                block_tables=[tuple(chunk.sequence.blocks) for chunk in plan.chunks],
            )
            self._planned = None
            self._attention.plan(batch)
            planned = self._planned = _Planned(plan, batch, torch.tensor(batch.positions()))
        return planned

    def _run_layers(
        self, hidden: torch.Tensor, positions: torch.Tensor, first: int, last: int
    ) -> torch.Tensor:
        if self._graphs is not None and (first, last) == (0, self._model.config.layers):
            return self._graphs.run(hidden, positions)
        if not self._pace_s:
            return self._model.run_layers(hidden, positions, first, last)
        due = time.monotonic()
        for layer in range(first, last):
            hidden = self._model.run_layers(hidden, positions, layer, layer + 1)
            due = max(due + self._pace_s, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
        return hidden
