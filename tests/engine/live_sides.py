"""A replica of a live pair in the test's own thread, and what two of them hand over."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from blitzd.engine.arena import Arena
from blitzd.engine.attention import TorchAttention
from blitzd.engine.executor import Executor
from blitzd.engine.hidden_slots import HiddenSlots
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.live import LiveRequest
from blitzd.engine.live_stepper import LiveStepper
from blitzd.engine.llama import Llama
from blitzd.engine.replica import relay_geometry
from blitzd.engine.stepper import Step
from blitzd.engine.tokenizer import Tokenizer
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import BlockManager, Scheduler
from blitzd.sched.zigzag import Policy
from tests.engine.local_replica import request

LAYERS = 5
PROMPTS = {
    1: "The capital of France",
    2: "a",
    3: "z" * 65,
    4: "naïve café: " * 14,
    5: "y" * 64,
    6: "sampled",
}
SAMPLING = {6: {"temperature": 0.9, "seed": 11}}


@dataclass
class Side:
    """A replica without its thread. `layers_run` is every (request, layer) in order."""

    directory: Path
    ready: int = LAYERS
    blocks: int = 40
    policy: Policy = Policy.ILP_FREE
    tokens: dict[int, int] = field(default_factory=dict)
    finish: dict[int, pb.FinishReason] = field(default_factory=dict)
    relayed: dict[int, int] = field(default_factory=dict)
    layers_run: list[tuple[int, int]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arena = Arena.open(self.directory)
        config = arena.config
        geometry = KvGeometry.of(config, self.blocks)
        self.cache = KvCache(geometry, bytearray(geometry.bytes))
        attention = TorchAttention(self.cache, config.heads)
        executor = Executor(Llama(config, arena, attention), attention)
        relay = relay_geometry(config)
        self.slots = HiddenSlots(relay, bytearray(relay.bytes))
        scheduler = Scheduler(
            BlockManager(self.blocks, geometry.block_tokens),
            context_tokens=config.context_tokens,
            max_batch_tokens=512,
            max_batch_size=16,
        )
        tokenizer = Tokenizer.from_dir(self.directory)
        self.stepper = LiveStepper(
            executor, scheduler, tokenizer, config.vocab, config.layers, self.slots, self.policy
        )
        self.live = self.stepper.live
        self.live.ready = self.ready
        self.out: Step | None = None

    def prefill(self, number: int, max_tokens: int = 8, **sampling: object) -> None:
        wanted = SAMPLING.get(number, {}) | sampling
        self.stepper.prefill(request(number, PROMPTS[number], max_tokens, **wanted), hold=True)

    def begin(self) -> bool:
        self.out = self.stepper.begin()
        return self.out is not None

    def end(self) -> None:
        step = self.out
        assert step is not None
        live = getattr(step, "live", None)
        if live is not None:
            layers = range(live.one.done, live.last)
            self.layers_run += [(live.one.id, layer) for layer in layers]
        report = self.stepper.finish(step, self.stepper.compute(step))
        self.out = None
        self.read(report)

    def read(self, report: pb.StepReport) -> None:
        rows = zip(report.request_ids, report.token_ids, report.finish, strict=True)
        for number, token, finish in rows:
            assert number not in self.tokens
            self.tokens[number], self.finish[number] = token, finish
        self.relayed |= dict(zip(report.relayed_ids, report.relayed_layers, strict=True))
        self.failed |= dict(zip(report.failed_ids, report.errors, strict=True))

    def step(self) -> bool:
        moved = self.begin()
        if moved:
            self.end()
        return moved

    def kv(self, number: int, layers: tuple[int, int] | None = None) -> torch.Tensor:
        """[2 * layers, tokens, ...] of a held request."""
        tokens, blocks = self.stepper.held(number, layers)
        first, last = layers or (0, LAYERS)
        found = self.cache.tensor[first:last][:, :, blocks]
        return found.flatten(2, 3)[:, :, :tokens].clone()

    def empty(self) -> None:
        self.read(self.stepper.idle_report())
        self.stepper.release(list(self.stepper.request_ids))
        self.stepper.audit()
        assert self.stepper.request_ids == [] and self.live.empty
        assert self.slots.free == self.slots.geometry.slots
        assert self.stepper.occupancy.blocks_used == 0


def relay(new: Side, old: Side, one: LiveRequest) -> None:
    """What the two workers do, without the bytes' way."""
    taken = old.stepper.expect(one.request, one.done)
    new.live.sent()
    if one.done:
        assert one.slot is not None and taken.slot is not None
        old.slots.get(taken.slot).copy_(new.slots.get(one.slot))
    new.stepper.acknowledged(one.id)
    old.live.arrived(one.id)
    new.read(new.stepper.idle_report())
