"""A model that runs: its KV cache in a shared arena, its step loop."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from blitzd.engine.arena import Arena
from blitzd.engine.attention import TorchAttention
from blitzd.engine.attention_flashinfer import FlashInferAttention
from blitzd.engine.decode_graphs import GRAPH_ROWS, DecodeGraphs
from blitzd.engine.device import unsupported
from blitzd.engine.errors import InvalidField
from blitzd.engine.executor import Executor
from blitzd.engine.hidden_slots import HiddenSlots, SlotGeometry
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.live_stepper import LiveStepper
from blitzd.engine.llama import Llama
from blitzd.engine.model_config import ModelConfig
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.prepared import Prepared
from blitzd.engine.step_loop import StepLoop
from blitzd.fabric import SharedArena
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import BlockManager, Scheduler
from blitzd.sched.zigzag import Policy

log = structlog.get_logger()

RELAY_SLOTS = 2
"""For hidden states: one request on its way, one that runs."""
RELAY_ROWS = 8192
"""Tokens of a live prefill, at most."""


@dataclass(slots=True)
class Replica:
    model_dir: Path
    arena: Arena
    geometry: KvGeometry
    kv: SharedArena
    """What other replicas read: KV, which `cache` stages to and from it, then `slots`."""
    cache: KvCache
    slots: HiddenSlots
    steps: StepLoop

    @property
    def digest(self) -> str:
        return self.arena.config.digest

    @property
    def layout(self) -> str:
        """Equal in two replicas whose KV blocks mean the same, byte for byte."""
        return f"{self.geometry.layout}-{self.digest}"

    def close(self, timeout_s: float) -> None:
        """Ends the step loop and gives the KV cache back. Weights go with the last view."""
        if not self.steps.stop(timeout_s):
            log.error("the step loop did not end in time", timeout_s=timeout_s)
        self.kv.close()


def open_replica(
    prepared: Prepared,
    blocks_total: int,
    options: ReplicaOptions,
    publish: Callable[[pb.StepReport], None],
    crashed: Callable[[BaseException], None],
    arriving: bool = False,
) -> Replica:
    """Makes the model run: a KV cache of `blocks_total` blocks, a step loop, started. With
    `arriving` weights it runs no layer before `steps.exclusive().live.ready` says so.

    Takes milliseconds. Raises InvalidField (blocks_total), MemoryError.
    """
    began = time.monotonic()
    torch.set_num_threads(options.threads)
    if blocks_total < 1:
        raise InvalidField(f"blocks_total: {blocks_total}; at least one KV block is needed")
    device = model_device(prepared.config, options)
    arena = Arena(prepared.config, prepared.layout, prepared.weights, device)
    geometry = KvGeometry.of(arena.config, blocks_total)
    relay = relay_geometry(arena.config)
    # Pages of slots that nobody uses take no memory.
    kv = SharedArena(geometry.bytes + relay.bytes, name="blitzd-kv")
    slots = HiddenSlots(relay, kv.buffer[geometry.bytes :])
    cache = KvCache(geometry, kv.buffer, device)
    executor = build_executor(arena, cache, options)
    scheduler = Scheduler(
        BlockManager(blocks_total, geometry.block_tokens),
        context_tokens=prepared.config.context_tokens,
        max_batch_tokens=options.max_batch_tokens,
        max_batch_size=options.max_batch_size,
    )
    config = prepared.config
    stepper = LiveStepper(
        executor,
        scheduler,
        prepared.tokenizer,
        config.vocab,
        config.layers,
        slots,
        Policy(options.live_policy),
    )
    if not arriving:
        stepper.live.ready = config.layers
    steps = StepLoop(stepper, publish, crashed)
    steps.start()
    log.info("replica runs", kv_bytes=geometry.bytes, ms=round((time.monotonic() - began) * 1e3))
    return Replica(prepared.directory, arena, geometry, kv, cache, slots, steps)


def relay_geometry(config: ModelConfig) -> SlotGeometry:
    rows = min(config.context_tokens, RELAY_ROWS)
    return SlotGeometry(RELAY_SLOTS, rows, config.hidden, config.dtype)


def model_device(config: ModelConfig, options: ReplicaOptions) -> torch.device | None:
    """None for the host. Raises InvalidField when the model cannot run on the device."""
    if options.device == "cpu":
        return None
    if reason := unsupported(config):
        raise InvalidField(f"model_path: {config.name} has {reason}")
    return torch.device(options.device)


def build_executor(arena: Arena, cache: KvCache, options: ReplicaOptions) -> Executor:
    """With the attention back end of the device that arena and cache lie on."""
    config = arena.config
    if options.device == "cpu":
        torch_attention = TorchAttention(cache, config.heads, config.sliding_window)
        model = Llama(config, arena, torch_attention)
        return Executor(model, torch_attention, options.pace_layer_ms)
    attention = FlashInferAttention(
        cache,
        config.heads,
        config.sliding_window,
        graph_rows=min(GRAPH_ROWS, options.max_batch_size),
        context_tokens=config.context_tokens,
    )
    model = Llama(config, arena, attention)
    # A graph is one piece; a floor under a layer's time needs the layers apart.
    graphs = None if options.pace_layer_ms else DecodeGraphs(model, attention)
    return Executor(model, attention, options.pace_layer_ms, graphs)
