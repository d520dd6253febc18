"""The engine's queues of a live pair do what the pair model says, to the ns, when time is virtual
and a hand-over takes none: so a difference that is measured is time that the model leaves out."""

import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from blitzd.engine.generation import admit
from blitzd.engine.hidden_slots import HiddenSlots, SlotGeometry
from blitzd.engine.live import LiveQueue, LiveStep
from blitzd.engine.tokenizer import Tokenizer
from blitzd.sched import BlockManager, Scheduler
from blitzd.sched.pair_model import Arrival, Pair, Planner, simulate
from blitzd.sched.zigzag import Policy
from blitzd.sched.zigzag_targets import planner_for
from tests.engine.local_replica import request
from tests.tiny import make_tiny

SEEDS = 200
PLANNED_SEEDS = 30
HIDDEN = 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(make_tiny(tmp_path_factory.mktemp("model") / "tiny"))


def queue_of(layers: int, ready: int, policy: Policy) -> LiveQueue:
    geometry = SlotGeometry(2, 4, HIDDEN, "float32")
    scheduler = Scheduler(
        BlockManager(64, 16), context_tokens=64, max_batch_tokens=64, max_batch_size=64
    )
    nobody = cast(Any, None)  # nothing is computed
    slots = HiddenSlots(geometry, bytearray(geometry.bytes))
    return LiveQueue(nobody, scheduler, layers, slots, policy, ready)


@dataclass
class Virtual:
    pair: Pair
    policy: Policy
    tokenizer: Tokenizer
    planner: Planner | None = None
    now: int = 0
    arrived: int = 0
    finish_ns: dict[int, int] = field(default_factory=dict)
    steps: dict[bool, tuple[LiveStep, int] | None] = field(default_factory=dict)
    """Of New (True) and Old: what runs, and until when."""

    def __post_init__(self) -> None:
        layers = self.pair.layers
        self.sides = {
            True: queue_of(layers, 0, self.policy),
            False: queue_of(layers, layers, Policy.ILP_FREE),
        }
        self.steps = {True: None, False: None}

    def run(self) -> list[int]:
        """When each request ended."""
        while len(self.finish_ns) < len(self.pair.arrivals):
            self.end(True)
            self.end(False)
            self.sides[True].set_ready(sum(at <= self.now for at in self.pair.ready_ns))
            self.plan(self.arrive())
            if self.steps[False] is None and self.now >= self.pair.old_free_ns:
                self.take()
                self.begin(False)
            self.begin(True)
            if len(self.finish_ns) < len(self.pair.arrivals):
                self.now = min(at for at in self.times() if at > self.now)
        for side in self.sides.values():
            assert side.empty and side.slots.free == 2 and side.scheduler.blocks.used == 0
        return [self.finish_ns[n] for n in range(len(self.pair.arrivals))]

    def times(self) -> list[int]:
        running = [step[1] for step in self.steps.values() if step is not None]
        coming = [one.at_ns for one in self.pair.arrivals[self.arrived :]]
        return [*running, *coming, *self.pair.ready_ns, self.pair.old_free_ns]

    def plan(self, arrived: bool) -> None:
        """As the model does: at arrivals, and when the first layer is there."""
        new, old = self.sides[True], self.steps[False]
        first_layer = self.now == self.pair.ready_ns[0]
        if self.planner is None or not (arrived or first_layer):
            return
        if new.waiting and 0 < new.ready < new.layers:
            free = old[1] if old is not None else self.pair.old_free_ns
            asked = [
                (one.order, self.pair.arrivals[one.order - 1].layer_ns, one.done)
                for one in new.waiting
            ]
            new.set_targets(self.planner(self.now, max(self.now, free), asked))

    def arrive(self) -> bool:
        before = self.arrived
        while self.arrived < len(self.pair.arrivals):
            if self.pair.arrivals[self.arrived].at_ns > self.now:
                break
            one = request(self.arrived + 1, "x", 1)
            self.sides[True].add(one, admit(one, self.tokenizer, 259, hold=True))
            self.arrived += 1
        return self.arrived > before

    def take(self) -> None:
        new, old = self.sides[True], self.sides[False]
        one = new.ask()
        if one is None:
            new.unask()
            return
        new.sent()
        old.expect(one.request, admit(one.request, self.tokenizer, 259, hold=True), one.done)
        new.scheduler.give_back(new.acknowledged(one.id).reservation)
        old.arrived(one.id)

    def begin(self, on_new: bool) -> None:
        step = self.sides[on_new].begin() if self.steps[on_new] is None else None
        if step is not None:
            layer_ns = self.pair.arrivals[step.one.id - 1].layer_ns
            until = self.now + (step.last - step.one.done) * layer_ns
            self.steps[on_new] = (step, until)

    def end(self, on_new: bool) -> None:
        running = self.steps[on_new]
        if running is None or running[1] > self.now:
            return
        self.steps[on_new] = None
        one = self.sides[on_new].finish(running[0], torch.zeros(1, HIDDEN))
        if one is not None:
            self.finish_ns[one.id - 1] = self.now
            self.sides[on_new].scheduler.give_back(one.reservation)


def drawn(seed: int) -> Pair:
    draw = random.Random(seed)
    layers = draw.randint(1, 12)
    at, ready = 0, []
    for _ in range(layers):
        at += draw.choice([0, 1, 3, draw.randint(0, 20)])
        ready.append(at)
    times = sorted(draw.randint(0, at + 10) for _ in range(draw.randint(1, 14)))
    arrivals = tuple(Arrival(when, draw.randint(1, 4)) for when in times)
    return Pair(tuple(ready), arrivals, old_free_ns=draw.choice([0, draw.randint(0, 30)]))


@pytest.mark.parametrize("policy", [Policy.ILP_FREE, Policy.BEST_EFFORT])
def test_the_queues_do_what_the_model_says(tokenizer: Tokenizer, policy: Policy) -> None:
    for seed in range(SEEDS):
        pair = drawn(seed)
        found = Virtual(pair, policy, tokenizer).run()
        assert found == simulate(pair, policy).finish_ns, f"seed={seed}"


def test_they_keep_to_a_plan_as_the_model_does(tokenizer: Tokenizer) -> None:
    for seed in range(PLANNED_SEEDS):
        pair = drawn(seed)
        found = Virtual(pair, Policy.ILP, tokenizer, planner_for(pair)).run()
        assert found == simulate(pair, Policy.ILP, planner_for(pair)).finish_ns, f"seed={seed}"
