"""Step times from first principles: the slower of computing and reading, plus all-reduces.

Assumptions, all in the constants below: matrix products reach 55 % of the dense peak in
prefill and decode alike, memory 80 % of its peak, attention the same shares; tensor
parallelism adds two ring all-reduces a layer, not overlapped; a pipeline hop sends one
hidden state a token. They set the absolute figures; rankings move little with them.
"""

from dataclasses import dataclass

from blitzd.sim.errors import InputError
from blitzd.sim.hardware import Gpu
from blitzd.sim.models import Model

COMPUTE_EFFICIENCY = 0.55
MEMORY_EFFICIENCY = 0.80
MEMORY_USABLE = 0.90
"""Of the device's memory, for weights and KV; the rest is activations and the runtime."""
STEP_OVERHEAD_S = 0.5e-3
"""Scheduling and launch of one iteration, with CUDA graphs."""
ALLREDUCE_LATENCY_S = 8e-6


@dataclass(frozen=True, slots=True)
class Roofline:
    """One model on a group of `tp` GPUs, all layers. Times are whole forward passes: a
    pipeline of pp such groups takes as long per pass and runs pp passes at a time."""

    model: Model
    gpu: Gpu
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or (self.model.kv_heads % self.tp and self.tp % self.model.kv_heads):
            raise InputError(
                f"tp: {self.tp} does not divide the {self.model.kv_heads} KV heads of "
                f"{self.model.name}"
            )

    @property
    def flops_per_s(self) -> float:
        return self.tp * self.gpu.tflops * 1e12 * COMPUTE_EFFICIENCY

    @property
    def bytes_per_s(self) -> float:
        return self.tp * self.gpu.memory_gb_s * 1e9 * MEMORY_EFFICIENCY

    def allreduce_s(self, tokens: int) -> float:
        """Two ring all-reduces a layer: each moves 2 (tp-1)/tp of the hidden states."""
        if self.tp == 1:
            return 0.0
        size = tokens * self.model.hidden * self.model.dtype_bytes
        moved = 2 * (self.tp - 1) / self.tp * size
        once = ALLREDUCE_LATENCY_S + moved / (self.gpu.nvlink_gb_s * 1e9)
        return 2 * self.model.layers * once

    def linear_s(self, tokens: int) -> float:
        """All matrix products of a step of `tokens` tokens, all-reduces, fixed costs."""
        compute = tokens * self.model.matmul_flops_per_token / self.flops_per_s
        read = self.model.weight_bytes / self.bytes_per_s
        return max(compute, read) + self.allreduce_s(tokens) + STEP_OVERHEAD_S

    def attention_prefill_s(self, new_tokens: int, past_tokens: int = 0) -> float:
        return self.model.attention_flops(new_tokens, past_tokens) / self.flops_per_s

    def attention_decode_s(self, context_tokens: int) -> float:
        """Reading the KV of `context_tokens`, summed over the batch."""
        return context_tokens * self._kv_bytes_per_token / self.bytes_per_s

    def kv_capacity_tokens(self, pp: int = 1) -> int:
        """Tokens of KV that fit beside the weights on tp x pp GPUs; 0 when weights do not."""
        usable = self.tp * pp * self.gpu.memory_gb * 1e9 * MEMORY_USABLE
        return max(0, int((usable - self.model.weight_bytes) / self._kv_bytes_per_token))

    @property
    def _kv_bytes_per_token(self) -> int:
        """On all GPUs of the group: with more of them than KV heads, heads are repeated."""
        return self.model.kv_bytes_per_token * max(1, self.tp // self.model.kv_heads)
