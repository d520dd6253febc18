"""A decode step's layers as one CUDA graph for each batch size.

A decode step of a small batch is hundreds of kernels of a few microseconds; launching them
one by one takes the host longer than the device needs to run them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blitzd.engine.attention_flashinfer import FlashInferAttention
from blitzd.engine.llama import Llama

GRAPH_ROWS = 32
"""Largest batch that is captured. Each size has 8 MiB of FlashInfer's planning buffers on
either side, and from here on the kernels are long enough to hide their launches."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    rotation: torch.Tensor
    out: torch.Tensor


class DecodeGraphs:
    """All layers of `model`, over what `attention` has planned. Captures a batch size the
    first time that it comes."""

    def __init__(self, model: Llama, attention: FlashInferAttention) -> None:
        self._model = model
        self._attention = attention
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def run(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What `model.run_layers` gives for all layers; the batch may be any."""
        rotation = self._model.rotation(positions)
        rows = self._attention.captured_rows
        if not rows:
            return self._model.run_rotated(hidden, rotation, 0, self._model.config.layers)
        captured = self._captured.get(rows)
        if captured is None:
            captured = self._captured[rows] = self._capture(hidden, rotation)
        captured.hidden.copy_(hidden)
        captured.rotation.copy_(rotation)
        captured.graph.replay()
        # The graphs share their memory: the next one may write over this one's result.
        return captured.out.clone()

    def _capture(self, hidden: torch.Tensor, rotation: torch.Tensor) -> _Captured:
        hidden, rotation = hidden.clone(), rotation.clone()
        layers = self._model.config.layers
        # Once outside: what libraries set up on first use cannot be captured. It writes the
        # keys and values that the replay writes again.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._model.run_rotated(hidden, rotation, 0, layers)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads stage KV meanwhile; only this one's work is captured.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self._model.run_rotated(hidden, rotation, 0, layers)
        return _Captured(graph, hidden, rotation, out)
