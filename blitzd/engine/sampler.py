"""From logits to tokens.

The randomness of a token comes from a counter-based generator keyed by the request's
seed and the token's position, so it is the same in any batch, on any replica and after
a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blitzd.engine.logits import RowContext, SamplingParams, adjust, restrict
from blitzd.engine.token_logprobs import TokenLogprobs

__all__ = ["RowContext", "SamplingParams", "TokenLogprobs", "logprobs", "sample"]

_MASK32 = 0xFFFFFFFF


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    contexts: Sequence[RowContext] | None = None,
) -> list[int]:
    """One token for each row of [rows, vocab]; `positions` are the places in their requests
    that the new tokens take.

    `contexts` are needed where a row has penalties or a mask. In this order: mask, bias
    and penalties; temperature; top-k, top-p, min-p, typical-p; the draw.
    """
    if not len(params) == len(positions) == logits.shape[0]:
        raise ValueError(
            f"{logits.shape[0]} rows, {len(params)} parameters and {len(positions)} positions"
        )
    if contexts is not None and len(contexts) != len(params):
        raise ValueError(f"{len(params)} rows and {len(contexts)} contexts")
    for row, param in enumerate(params):
        context = contexts[row] if contexts is not None else None
        if param.adjusts or (context is not None and context.allowed is not None):
            logits = logits.index_copy(
                0, torch.tensor([row]), adjust(logits[row], param, context).unsqueeze(0)
            )
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, param in enumerate(params) if param.draws]
    if drawn:
        scale = torch.tensor([[params[row].temperature] for row in drawn], dtype=torch.float64)
        scaled = logits[drawn].double() / scale
        for index, row in enumerate(drawn):
            if params[row].restricts:
                scaled[index] = restrict(scaled[index], params[row])
        chosen = _draw(scaled, [uniform(params[row].seed, positions[row]) for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


@torch.inference_mode()
def logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Under the model's own distribution, before any adjustment: of `tokens`, one for each
    row of [rows, vocab], and of the `top` best (all, if there are fewer). Serves chosen and
    prompt tokens alike."""
    found = torch.log_softmax(logits, -1)
    chosen = torch.tensor(tokens, device=found.device).unsqueeze(1)
    own = found.gather(1, chosen).squeeze(1).tolist()
    values, ids = (part.tolist() for part in found.topk(min(top, found.shape[1])))
    return [
        TokenLogprobs(own[row], list(zip(ids[row], values[row], strict=True)))
        for row in range(len(own))
    ]


def _draw(logits: torch.Tensor, uniforms: list[float]) -> list[int]:
    """Inverts the cumulative distribution of each row at its uniform number."""
    mass = torch.softmax(logits, -1).cumsum(-1)
    wanted = torch.tensor(uniforms, dtype=torch.float64).unsqueeze(1) * mass[:, -1:]
    # Rounding may carry a draw past the last token that has any mass.
    last = (mass < mass[:, -1:]).sum(-1, keepdim=True)
    index = torch.minimum(torch.searchsorted(mass, wanted, right=True), last)
    tokens: list[int] = index.squeeze(1).tolist()
    return tokens


def uniform(seed: int, position: int) -> float:
    """In [0, 1), with 53 bits of Philox4x32-10 at counter `position` under key `seed`."""
    first, second, _, _ = philox(
        (position & _MASK32, position >> 32 & _MASK32, 0, 0),
        (seed & _MASK32, seed >> 32 & _MASK32),
    )
    return ((first << 21) | (second >> 11)) / (1 << 53)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3
