"""What a request's output should be, from transformers' logits alone: no chunks, no cache, no
batch, no replica."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import torch

from blitzd.engine.generation import params_of
from blitzd.engine.sampler import RowContext, sample
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.scenario import Story


class Oracle:
    """Teacher-forced: each token of an output is checked against what the model gives after
    the tokens before it. `worst` is the largest difference of a logprob."""

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.worst = 0.0

    def check(self, story: Story) -> None:
        prompt, tokens = list(story.spec.prompt), story.tokens
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + tokens])).logits[0]
        assert tokens == self._tokens(story.spec.sampling, logits, prompt, tokens)
        self._check_logprobs(story, logits.log_softmax(-1))
        self._check_end(story)

    def _tokens(
        self, sampling: pb.Sampling, logits: torch.Tensor, prompt: list[int], tokens: list[int]
    ) -> list[int]:
        found = []
        for index in range(len(tokens)):
            at = len(prompt) + index
            row = logits[at - 1 : at].clone()
            if index < sampling.min_tokens:
                row[0, list(self._ends(sampling))] = -torch.inf
            context = RowContext(prompt, tokens[:index])
            found += sample(row, [params_of(sampling)], [at], [context])
        return found

    def _ends(self, sampling: pb.Sampling) -> set[int]:
        eos = () if sampling.ignore_eos else self._tokenizer.eos_token_ids
        return {*eos, *sampling.stop_token_ids}

    def _check_logprobs(self, story: Story, expected: torch.Tensor) -> None:
        sampling, prompt = story.spec.sampling, len(story.spec.prompt)
        tokens = [*story.spec.prompt, *story.tokens]
        first = 1 if sampling.prompt_logprobs is not None else prompt
        last = len(tokens) if sampling.logprobs is not None else prompt
        assert sorted(story.logprobs) == list(range(first, last))
        for position, (value, top) in story.logprobs.items():
            row = expected[position - 1]
            wanted = sampling.prompt_logprobs if position < prompt else sampling.logprobs
            best = row.topk(wanted or 0)
            assert [token for token, _ in top] == best.indices.tolist()
            values = torch.tensor([value, *(v for _, v in top)], dtype=torch.float64)
            theirs = torch.cat((row[tokens[position]].view(1), best.values))
            self.worst = max(self.worst, float((values - theirs).abs().max()))

    def _check_end(self, story: Story) -> None:
        """Text and reason: the first end of any kind is the end."""
        spec, tokens = story.spec, story.tokens
        ends = self._ends(spec.sampling)
        at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        text, stopped = self._text(tokens[:at], spec.sampling)
        assert story.text == text, (tokens, spec.sampling, story.finish)
        if story.finish is pb.FinishReason.STOP:
            assert at == len(tokens) - 1 or stopped == len(tokens)
        else:
            assert at == len(tokens) == spec.max_tokens
            assert stopped is None

    def _text(self, tokens: Sequence[int], sampling: pb.Sampling) -> tuple[str, int | None]:
        """(the output's text, how many tokens it took to find a stop string, if any)."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        exempt = text = ""
        for count, token in enumerate(tokens, 1):
            piece = decoder.decode(self._tokenizer.token_bytes(token))
            if count <= sampling.min_tokens:
                exempt += piece
                continue
            text += piece
            found = _stops(text, sampling.stop)
            if found:
                return exempt + text[: found[0][1]], count
        # What a character cut short leaves may be what is missing of a stop string.
        text += decoder.decode(b"", final=True)
        found = _stops(text, sampling.stop)
        return (exempt + text[: found[0][1]], len(tokens)) if found else (exempt + text, None)


def _stops(text: str, stop: Sequence[str]) -> list[tuple[int, int]]:
    """(end, start) of the stop strings in `text`, the one that is complete first before."""
    return sorted((at + len(one), at) for one in stop if (at := text.find(one)) >= 0)
