"""From logits to tokens.

A draw is the greatest of the logits after noise (Gumbel-max). The noise comes from a
counter-based generator (Philox4x64-10) keyed by the request's seed and the token's position,
so it is the same in any batch, on any replica and after a resume. Logits are not, to the last
bit: their rounding differs with the batch's shape. That changes the greatest of them next to
never, while a draw through the cumulative distribution, where the roundings of 49,152 tokens
add up, would change in one token of two hundred.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from blitzd.engine.logits import RowContext, SamplingParams, adjust, restrict
from blitzd.engine.token_logprobs import TokenLogprobs

__all__ = ["RowContext", "SamplingParams", "TokenLogprobs", "logprobs", "sample"]


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
        for index, row in enumerate(drawn):
            scaled[index] += _gumbels(params[row].seed, positions[row], scaled.shape[1])
        for row, token in zip(drawn, scaled.argmax(-1).tolist(), strict=True):
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


def _gumbels(seed: int, position: int, vocab: int) -> torch.Tensor:
    """[vocab] float64: a number from the standard Gumbel distribution for each token, which
    depends on the seed, the position and the token alone."""
    # The generator counts in the lowest word, so the position goes into the next.
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    key = np.array([seed, 0], dtype=np.uint64)
    words = np.random.Philox(counter=counter, key=key).random_raw((vocab + 1) // 2)
    halves = words.astype("<u8", copy=False).view("<u4")[:vocab]
    uniforms = torch.from_numpy(halves.astype(np.float64)).add_(0.5).div_(1 << 32)
    return uniforms.log_().neg_().log_().neg_()
