"""From a validated body to the generations to run: model, tokens, and the room for output."""

from blitzd.http.errors import ApiError, bad_request
from blitzd.http.neutral import shown
from blitzd.http.schema import ChatRequest, CompletionRequest, Sampling
from blitzd.node.face import ChatTokenizer, GenerateRequest, ModelCard, NodeFace

COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` for plain completions. Chat's is the rest of the context."""


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


def of_chat(card: ModelCard, tokenizer: ChatTokenizer, body: ChatRequest) -> list[GenerateRequest]:
    """Raises ApiError (400)."""
    messages = [{"role": m.role, "content": m.text()} for m in body.messages]
    try:
        text = tokenizer.render_chat(messages)
    except ValueError as failure:
        raise bad_request(f"the chat template refused: {failure}", param="messages") from failure
    tokens = _tokens(tokenizer, text, "messages")
    return [_generation(body, card, tokens, "messages", default_tokens=None)]


def of_completion(
    card: ModelCard, tokenizer: ChatTokenizer, body: CompletionRequest
) -> list[GenerateRequest]:
    """One generation a prompt, in the order given. Raises ApiError (400)."""
    requests = []
    for prompt in body.prompts():
        if isinstance(prompt, str):
            tokens = _tokens(tokenizer, prompt, "prompt")
        else:
            _check_ids(prompt, card, "prompt")
            tokens = prompt
        requests.append(_generation(body, card, tokens, "prompt", COMPLETION_TOKENS))
    return requests


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
    body: Sampling, card: ModelCard, tokens: list[int], param: str, default_tokens: int | None
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
        model=card.name,
    )


def _max_tokens(
    body: Sampling, card: ModelCard, prompt_tokens: int, param: str, default: int | None
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
