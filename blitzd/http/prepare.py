"""From a validated body to the generations to run: model, tokens, and the room for output."""

from dataclasses import dataclass, replace

from blitzd.http.errors import ApiError, bad_request
from blitzd.http.neutral import shown
from blitzd.http.schema import Body, ChatRequest, CompletionRequest
from blitzd.node.face import ChatTokenizer, GenerateRequest, ModelCard, NodeFace

COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for plain completions. Chat's is the rest of the context."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: odd, so that a seed's choices all have different ones."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One choice."""

    request: GenerateRequest
    echoed: str | None = None
    """The prompt's text, if the answer is to begin with it."""
    first: bool = True
    """Of its prompt's choices; the others share its prompt, which counts once."""


def card_of(node: NodeFace, model: str) -> ModelCard:
    """Raises ApiError (404, `model_not_found`)."""
    for card in node.models:
        if card.name == model:
            return card
    served = ", ".join(card.name for card in node.models) or "none"
    raise ApiError(
        404,
        f"the model {shown(model)} does not exist; served here: {served}",
        code="model_not_found",
        param="model",
    )


def of_chat(card: ModelCard, tokenizer: ChatTokenizer, body: ChatRequest) -> list[Wanted]:
    """`n` choices. Raises ApiError (400)."""
    messages = [{"role": m.role, "content": m.text()} for m in body.messages]
    try:
        text = tokenizer.render_chat(messages)
    except ValueError as failure:
        raise bad_request(f"the chat template refused: {failure}", param="messages") from failure
    tokens = _tokens(tokenizer, text, "messages")
    return _choices(_generation(body, card, tokens, "messages", default_tokens=None), body)


def of_completion(
    card: ModelCard, tokenizer: ChatTokenizer, body: CompletionRequest
) -> list[Wanted]:
    """`n` choices a prompt, prompts in the order given. Raises ApiError (400)."""
    wanted = []
    for prompt in body.prompts():
        if isinstance(prompt, str):
            tokens = _tokens(tokenizer, prompt, "prompt")
        else:
            _check_ids(prompt, card, "prompt")
            tokens = prompt
        request = _generation(body, card, tokens, "prompt", COMPLETION_TOKENS)
        echoed = None
        if body.echo:
            request = replace(request, prompt_logprobs=body.logprobs)
            echoed = prompt if isinstance(prompt, str) else _text(tokenizer, prompt)
        wanted += _choices(request, body, echoed)
    return wanted


def _choices(request: GenerateRequest, body: Body, echoed: str | None = None) -> list[Wanted]:
    """The first has the seed that was asked for, the others theirs derived from it."""
    return [
        Wanted(
            request
            if request.seed is None
            else replace(request, seed=(request.seed + index * _SEED_STEP) % 2**64),
            echoed,
            first=index == 0,
        )
        for index in range(body.n or 1)
    ]


def _text(tokenizer: ChatTokenizer, tokens: list[int]) -> str:
    return b"".join(tokenizer.spell(token)[1] for token in tokens).decode(errors="replace")


def _tokens(tokenizer: ChatTokenizer, text: str, param: str) -> list[int]:
    tokens = tokenizer.encode(text)
    if not tokens:
        raise bad_request(f"{param} has no tokens; accepted: at least one", param=param)
    return tokens


def _check_ids(ids: list[int], card: ModelCard, param: str) -> None:
    for token in ids:
        if token >= card.vocab_tokens:
            raise bad_request(
                f"{param} has the token id {token}; accepted: 0 to {card.vocab_tokens - 1}",
                param=param,
            )


def _generation(
    body: Body, card: ModelCard, tokens: list[int], param: str, default_tokens: int | None
) -> GenerateRequest:
    stop_ids = body.stop_token_ids or []
    _check_ids(stop_ids, card, "stop_token_ids")
    max_tokens = _max_tokens(body, card, len(tokens), param, default_tokens)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens is {min_tokens}; accepted: at most the {max_tokens} tokens of output "
            "that this request may have",
            param="min_tokens",
        )
    return GenerateRequest(
        prompt_tokens=tuple(tokens),
        max_tokens=max_tokens,
        temperature=card.temperature if body.temperature is None else body.temperature,
        # The node's seeds are unsigned; OpenAI's are signed.
        seed=None if body.seed is None else body.seed % 2**64,
        stop=body.stop_strings(),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        # -1 is how some clients say "all".
        top_k=max(body.top_k or 0, 0),
        top_p=_or_one(body.top_p),
        min_p=body.min_p or 0.0,
        typical_p=_or_one(body.typical_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or_one(body.repetition_penalty),
        logit_bias=_logit_bias(body.logit_bias or {}, card),
        logprobs=body.top(),
        model=card.name,
        deadline_ms=body.deadline_ms,
        recompute=body.on_worker_loss != "fail",
    )


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value


def _logit_bias(biases: dict[str, float], card: ModelCard) -> tuple[tuple[int, float], ...]:
    found = {}
    for key, bias in biases.items():
        # Written one way only, or "01" would silently stand for "1" beside it.
        usual = key.isascii() and key.isdigit() and len(key) <= 10 and key == str(int(key))
        if not usual or int(key) >= card.vocab_tokens:
            raise bad_request(
                f"logit_bias has the key {shown(key)}; accepted: token ids, "
                f"0 to {card.vocab_tokens - 1}",
                param="logit_bias",
            )
        if not -100 <= bias <= 100:
            raise bad_request(
                f"logit_bias of token {key} is {bias}; accepted: -100 to 100", param="logit_bias"
            )
        found[int(key)] = bias
    return tuple(found.items())


def _max_tokens(
    body: Body, card: ModelCard, prompt_tokens: int, param: str, default: int | None
) -> int:
    room = card.context_tokens - prompt_tokens
    if room < 1:
        raise bad_request(
            f"{param} is {prompt_tokens} tokens long; accepted: at most "
            f"{card.context_tokens - 1}, since the context of {card.name} is "
            f"{card.context_tokens} tokens and one is needed for the answer",
            param=param,
            code="context_length_exceeded",
        )
    field, wanted = body.wanted_tokens()
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise bad_request(
            f"{field} is {wanted}; accepted: at most {room}, since the prompt takes "
            f"{prompt_tokens} of the {card.context_tokens} tokens of the context",
            param=field,
            code="context_length_exceeded",
        )
    return wanted
