"""What a step's logits give its requests: their next tokens, and logprobs where asked."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from blitzd.engine.finite import rows_not_finite, told
from blitzd.engine.generation import Generation
from blitzd.engine.llama import Llama
from blitzd.engine.sampler import RowContext, logprobs, sample
from blitzd.engine.token_logprobs import TokenLogprobs
from blitzd.sched import StepPlan

SCORED_ROWS = 64
"""Prompt rows whose logits exist at once: 12 MiB for a vocabulary of 49,152."""


class PromptScores(NamedTuple):
    generation: Generation
    first: int
    """The position of the first token that has been scored."""
    found: list[TokenLogprobs]


def choose(logits: torch.Tensor, generations: Sequence[Generation]) -> list[int]:
    """One token for each row of [rows, vocab]. `logits` is used up. A generation that wants
    logprobs has those of its token in `chosen` afterwards, one whose grammar failed says why
    in `fault`."""
    asked = [row for row, g in enumerate(generations) if g.logprobs is not None]
    # The model's own distribution: as it is before anything is added or banned.
    own = logits[asked] if asked else None
    contexts: list[RowContext] | None = None
    for row, generation in enumerate(generations):
        if banned := generation.banned:
            logits[row, list(banned)] = -torch.inf
        if generation.needs_context:
            contexts = contexts or [RowContext()] * len(generations)
            contexts[row] = generation.context(logits.shape[1])
    tokens = sample(
        logits,
        [generation.params for generation in generations],
        [len(generation.sequence.tokens) for generation in generations],
        contexts,
    )
    if own is not None:
        wanted = [generations[row].logprobs or 0 for row in asked]
        found = logprobs(own, [tokens[row] for row in asked], max(wanted))
        for row, count, (value, top) in zip(asked, wanted, found, strict=True):
            generations[row].chosen = TokenLogprobs(value, top[:count])
    return tokens


def score_prompts(
    model: Llama,
    plan: StepPlan,
    hidden: torch.Tensor,
    scoring: Sequence[Generation],
    spoilt: dict[int, str],
) -> list[PromptScores]:
    """Logprobs of those prompt tokens of `scoring` that follow a row of `hidden`, the rows
    of `plan` after all layers. A sequence whose logits are not finite has none; `spoilt` says
    then where they are, by its id."""
    wanted = {generation.sequence: generation for generation in scoring}
    scores, row = [], 0
    for chunk in plan.chunks:
        if generation := wanted.get(chunk.sequence):
            first = max(chunk.start + 1, generation.scored)
            end = min(chunk.start + chunk.count + 1, chunk.sequence.prompt_tokens)
            if first < end:
                start = row + first - 1 - chunk.start
                rows = hidden[start : start + end - first]
                try:
                    found = _score(model, rows, first, generation)
                except _NotFinite as error:
                    spoilt[chunk.sequence.id] = str(error)
                else:
                    scores.append(PromptScores(generation, first, found))
        row += chunk.count
    return scores


class _NotFinite(Exception):
    pass


def _score(
    model: Llama, rows: torch.Tensor, first: int, generation: Generation
) -> list[TokenLogprobs]:
    """Of the tokens from position `first` on, each of which follows one of `rows`."""
    found: list[TokenLogprobs] = []
    for at in range(first, first + len(rows), SCORED_ROWS):
        logits = model.logits(rows[at - first : at - first + SCORED_ROWS])
        for row in rows_not_finite(logits):
            raise _NotFinite(told("logits", at - 1 + row, at + row))
        part = generation.sequence.tokens[at : at + len(logits)]
        found += logprobs(logits, part, generation.prompt_logprobs or 0)
    return found
