"""One request in a worker: its place in the schedule, its sampling, its text so far."""

import math
from collections.abc import Sequence as Listing
from dataclasses import dataclass

from blitzd.engine.detokenizer import Detokenizer
from blitzd.engine.errors import InvalidField
from blitzd.engine.sampler import SamplingParams
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import Sequence

STOP_STRINGS = 64
"""More than any client sends; each costs a search per token."""


@dataclass(slots=True, eq=False)
class Generation:
    sequence: Sequence
    params: SamplingParams
    detokenizer: Detokenizer
    ends: frozenset[int]
    """Token ids that end the output and add no text to it."""
    min_tokens: int
    reported: bool = False
    """Its prefix-cache hits have been."""

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not come next: no end before `min_tokens`."""
        early = self.sequence.output_tokens < self.min_tokens
        return self.ends if early else frozenset()

    def feed(self, token: int) -> tuple[str, bool]:
        """(what the token makes certain of the text, whether it is the last)."""
        if token in self.ends:
            return self.detokenizer.flush(), True
        return self.detokenizer.feed(token)


def admit(request: pb.Request, tokenizer: Tokenizer, vocab: int, *, hold: bool) -> Generation:
    """A Generation for a request from the wire. Raises InvalidField."""
    check(request, vocab)
    sampling = request.sampling or pb.Sampling()
    detokenizer = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
    for token in request.output_tokens:
        # Their text went out where they were made.
        detokenizer.feed(token)
    eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
    return Generation(
        sequence=Sequence(
            id=request.request_id,
            tokens=[*request.prompt_tokens, *request.output_tokens],
            prompt_tokens=len(request.prompt_tokens),
            max_tokens=request.max_tokens,
            hold=hold,
        ),
        params=SamplingParams(temperature=sampling.temperature, seed=sampling.seed),
        detokenizer=detokenizer,
        ends=frozenset(eos) | frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
    )


def check(request: pb.Request, vocab: int) -> None:
    """Raises InvalidField for the first field that cannot be used."""
    if request.request_id < 1:
        raise InvalidField(f"request.request_id: {request.request_id}; must be at least 1")
    if not request.prompt_tokens:
        raise InvalidField("request.prompt_tokens: empty; at least one token is needed")
    if request.max_tokens < 1:
        raise InvalidField(f"request.max_tokens: {request.max_tokens}; must be at least 1")
    _check_tokens("request.prompt_tokens", request.prompt_tokens, vocab)
    _check_tokens("request.output_tokens", request.output_tokens, vocab)
    sampling = request.sampling or pb.Sampling()
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidField(
            f"request.sampling.temperature: {sampling.temperature}; must be 0 (greedy) or above"
        )
    if len(sampling.stop) > STOP_STRINGS:
        raise InvalidField(
            f"request.sampling.stop: {len(sampling.stop)} strings; at most {STOP_STRINGS}"
        )
    if "" in sampling.stop:
        raise InvalidField("request.sampling.stop: an empty string; it would end every output")
    _check_tokens("request.sampling.stop_token_ids", sampling.stop_token_ids, vocab)
    if sampling.min_tokens > request.max_tokens:
        raise InvalidField(
            f"request.sampling.min_tokens: {sampling.min_tokens}; must be at most max_tokens, "
            f"{request.max_tokens}"
        )


def _check_tokens(field: str, tokens: Listing[int], vocab: int) -> None:
    if tokens and max(tokens) >= vocab:
        at = next(i for i, token in enumerate(tokens) if token >= vocab)
        raise InvalidField(f"{field}[{at}]: {tokens[at]}; the vocabulary has ids [0, {vocab})")
