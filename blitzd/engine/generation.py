"""One request in a worker: its place in the schedule, its sampling, its text so far."""

from collections.abc import Callable, Sequence as Listing
from dataclasses import dataclass

import torch

from blitzd.engine.detokenizer import Detokenizer
from blitzd.engine.errors import InvalidField
from blitzd.engine.sampler import RowContext, SamplingParams
from blitzd.engine.token_logprobs import TokenLogprobs
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import Sequence

STOP_STRINGS = 64
"""More than any client sends; each costs a search per token."""
TOP_LOGPROBS = 20
"""Best tokens beside each token: OpenAI's bound."""

Grammar = Callable[[Listing[int]], torch.Tensor | None]
"""From a request's output tokens to what may come next: boolean [vocab], or None for
anything. Called on the step loop's thread once a token, so it must be quick; it decides
about the tokens that end the output too. What it raises ends its request alone."""


@dataclass(slots=True, eq=False)
class Generation:
    sequence: Sequence
    params: SamplingParams
    detokenizer: Detokenizer
    ends: frozenset[int]
    """Token ids that end the output and add no text to it."""
    min_tokens: int
    grammar: Grammar | None = None
    logprobs: int | None = None
    """How many of the best tokens are wanted beside each output token; None: no logprobs."""
    prompt_logprobs: int | None = None
    reported: bool = False
    """Its prefix-cache hits have been."""
    scored: int = 1
    """The logprobs of prompt tokens before this one have been reported."""
    chosen: TokenLogprobs | None = None
    """Of the newest token, if they are wanted."""
    fault: str = ""
    """Why it cannot go on."""
    lease: int = 0
    """By which its KV came; 0: it was computed here."""

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that may not come next: no end before `min_tokens`."""
        early = self.sequence.output_tokens < self.min_tokens
        return self.ends if early else frozenset()

    @property
    def needs_context(self) -> bool:
        return self.grammar is not None or self.params.penalises

    def context(self, vocab: int) -> RowContext:
        """What its next token depends on besides logits. If its grammar has nothing to give,
        `fault` says so."""
        tokens, prompt = self.sequence.tokens, self.sequence.prompt_tokens
        output = tokens[prompt:]
        return RowContext(tokens[:prompt], output, self._allowed(output, vocab))

    def _allowed(self, output: Listing[int], vocab: int) -> torch.Tensor | None:
        if self.grammar is None:
            return None
        try:
            allowed = self.grammar(output)
        except Exception as error:
            self.fault = f"grammar: {type(error).__name__}: {error}"
            return None
        if allowed is None:
            return None
        if allowed.shape != (vocab,) or allowed.dtype is not torch.bool:
            self.fault = (
                f"grammar: {allowed.dtype} {list(allowed.shape)}; must be torch.bool [{vocab}]"
            )
            return None
        if banned := self.banned:
            allowed = allowed.clone()
            allowed[list(banned)] = False
        if not bool(allowed.any()):
            self.fault = f"grammar: no token is allowed after {len(output)} of output"
            return None
        return allowed

    def feed(self, token: int) -> tuple[str, bool]:
        """(what the token makes certain of the text, whether it is the last)."""
        if token in self.ends:
            return self.detokenizer.flush(), True
        return self.detokenizer.feed(token)


def admit(
    request: pb.Request,
    tokenizer: Tokenizer,
    vocab: int,
    *,
    hold: bool,
    grammar: Grammar | None = None,
) -> Generation:
    """A Generation for a request from the wire. Raises InvalidField."""
    check(request, vocab)
    sampling = request.sampling or pb.Sampling()
    params = params_of(sampling)
    detokenizer = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
    for token in request.output_tokens:
        # Their text went out where they were made.
        try:
            detokenizer.feed(token)
        except ValueError as error:
            raise InvalidField(f"request.output_tokens: {error}") from None
    eos = () if sampling.ignore_eos else tokenizer.eos_token_ids
    return Generation(
        sequence=Sequence(
            id=request.request_id,
            tokens=[*request.prompt_tokens, *request.output_tokens],
            prompt_tokens=len(request.prompt_tokens),
            max_tokens=request.max_tokens,
            hold=hold,
            uncached=sampling.prompt_logprobs is not None,
        ),
        params=params,
        detokenizer=detokenizer,
        ends=frozenset(eos) | frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        grammar=grammar,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def params_of(sampling: pb.Sampling) -> SamplingParams:
    """Raises InvalidField."""
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            seed=sampling.seed,
            top_k=sampling.top_k,
            top_p=_or_one(sampling.top_p),
            min_p=sampling.min_p,
            typical_p=_or_one(sampling.typical_p),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=_or_one(sampling.repetition_penalty),
            logit_bias=tuple(zip(sampling.bias_token_ids, sampling.bias_values, strict=True)),
        )
    except ValueError as error:
        raise InvalidField(f"request.sampling.{error}") from None


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value


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
    _check_sampling(request.sampling or pb.Sampling(), request, vocab)


def _check_sampling(sampling: pb.Sampling, request: pb.Request, vocab: int) -> None:
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
    _check_tokens("request.sampling.bias_token_ids", sampling.bias_token_ids, vocab)
    if len(sampling.bias_token_ids) != len(sampling.bias_values):
        raise InvalidField(
            f"request.sampling.bias_values: {len(sampling.bias_values)} for "
            f"{len(sampling.bias_token_ids)} bias_token_ids; must be as many"
        )
    for field in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, field) or 0) > TOP_LOGPROBS:
            raise InvalidField(
                f"request.sampling.{field}: {getattr(sampling, field)}; at most {TOP_LOGPROBS}"
            )


def _check_tokens(field: str, tokens: Listing[int], vocab: int) -> None:
    if tokens and max(tokens) >= vocab:
        at = next(i for i, token in enumerate(tokens) if token >= vocab)
        raise InvalidField(f"{field}[{at}]: {tokens[at]}; the vocabulary has ids [0, {vocab})")
