"""From logits to tokens.

The randomness of a token comes from a counter-based generator keyed by the request's
seed and the token's position, so it is the same in any batch, on any replica and after
a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

_MASK32 = 0xFFFFFFFF


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """64 bits."""


@torch.inference_mode()
def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    """One token for each row of [rows, vocab]; `positions` are the places in their requests
    that the new tokens take."""
    if not len(params) == len(positions) == logits.shape[0]:
        raise ValueError(
            f"{logits.shape[0]} rows, {len(params)} parameters and {len(positions)} positions"
        )
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, param in enumerate(params) if param.temperature > 0]
    if drawn:
        scale = torch.tensor([[params[row].temperature] for row in drawn], dtype=torch.float64)
        chosen = _draw(
            logits[drawn].double() / scale,
            [uniform(params[row].seed, positions[row]) for row in drawn],
        )
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: torch.Tensor, uniforms: list[float]) -> list[int]:
    """Inverts the cumulative distribution of each row at its uniform number."""
    mass = torch.softmax(logits, -1).cumsum(-1)
    wanted = torch.tensor(uniforms, dtype=torch.float64).unsqueeze(1) * mass[:, -1:]
    index = torch.searchsorted(mass, wanted, right=True).clamp_(max=logits.shape[-1] - 1)
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
