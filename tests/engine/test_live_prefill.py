"""Prefills that run a layer at a time on two replicas: the tokens and the KV of one.

In the test's own thread, in whatever order it draws: float64, so that equal means equal.
"""

import random
from pathlib import Path

import pytest
import torch

from blitzd.engine.errors import NotHeld
from blitzd.engine.executor import Executor
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched import NoRoom, Refused
from blitzd.sched.zigzag import Policy
from tests.engine.live_sides import LAYERS, PROMPTS, Side, relay
from tests.engine.local_replica import request
from tests.tiny import make_tiny

HELD = pb.FinishReason.HELD


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny", "float64", layers=LAYERS)


@pytest.fixture(scope="module")
def alone(model: Path) -> Side:
    """All prompts prefilled plainly, each by itself, and held."""
    side = Side(model)
    for number in PROMPTS:
        side.prefill(number)
        assert side.step() and not side.live.ids
    assert side.finish == dict.fromkeys(PROMPTS, HELD)
    assert len(set(side.tokens.values())) > 2
    return side


@pytest.mark.parametrize("split", range(LAYERS + 1))
def test_every_split_has_the_token_and_the_kv_of_a_plain_prefill(
    model: Path, alone: Side, split: int
) -> None:
    for number in PROMPTS:
        new, old = Side(model, split), Side(model, blocks=33)
        new.prefill(number)
        if split == LAYERS:
            # Nothing arrives any more: it is an ordinary prefill.
            assert new.step() and new.tokens[number] == alone.tokens[number]
            assert torch.equal(new.kv(number), alone.kv(number))
            new.empty()
            continue
        while new.step():
            pass
        one = new.live.ask()
        assert one is not None and one.done == split
        relay(new, old, one)
        assert new.relayed == {number: split}
        assert old.step() and not old.step()
        assert old.relayed == {number: split}
        assert old.tokens == {number: alone.tokens[number]}
        assert old.finish[number] is HELD and not new.tokens
        assert new.layers_run == [(number, layer) for layer in range(split)]
        assert old.layers_run == [(number, layer) for layer in range(split, LAYERS)]
        expected = alone.kv(number)
        if split:
            torch.testing.assert_close(
                new.kv(number, (0, split)), expected[:split], rtol=0, atol=1e-12
            )
            with pytest.raises(NotHeld, match=rf"has layers \[0, {split}\) here, not all of"):
                new.kv(number)
        torch.testing.assert_close(
            old.kv(number, (split, LAYERS)), expected[split:], rtol=0, atol=1e-12
        )
        if split:
            with pytest.raises(Refused, match="only some of its layers"):
                old.stepper.resume([number])
        old.stepper.cancel([number])
        new.empty()
        old.empty()


class Order:
    """Random arrivals of requests and layers, steps of both sides, relays, cancellations."""

    def __init__(self, model: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.new, self.old = Side(model, 0), Side(model)
        self.old.live.ending = lambda: self.take() if self.random.random() < 0.7 else None
        self.coming = list(PROMPTS)
        self.random.shuffle(self.coming)
        self.cancelled: set[int] = set()
        self.took: list[int] = []
        self.came: list[int] = []

    def run(self) -> None:
        for _ in range(2000):
            if self.finished:
                return
            self.random.choice([self.arrive, self.layer, self.on_new, self.on_old, self.take])()
            if self.random.random() < 0.02:
                self.cancel()
        raise AssertionError("it does not end")

    @property
    def finished(self) -> bool:
        return (
            not self.coming
            and not self.new.stepper.live.ids
            and not (self.old.stepper.live.ids or self.new.out or self.old.out)
            and set(self.new.tokens) | set(self.old.tokens) | self.cancelled >= set(PROMPTS)
        )

    def arrive(self) -> None:
        if self.coming:
            number = self.coming.pop()
            self.came.append(number)
            self.new.prefill(number)

    def layer(self) -> None:
        if self.new.live.ready < LAYERS and self.random.random() < 0.3:
            self.new.live.ready += 1

    def on_new(self) -> None:
        self._move(self.new)

    def on_old(self) -> None:
        self._move(self.old)

    @staticmethod
    def _move(side: Side) -> None:
        if side.out is None:
            side.begin()
        else:
            side.end()

    def take(self) -> None:
        """At any time that Old can: in the middle of a step, as its last layer begins."""
        if not self.old.stepper.takes_more or self.new.live.drained:
            return
        one = self.new.live.ask()
        if one is None:
            return
        if self.random.random() < 0.2:
            self.new.live.sent()
            self.new.live.withdraw(one.id)
            return
        if self.new.live.ready < LAYERS:
            self.took.append(one.id)
        relay(self.new, self.old, one)

    def cancel(self) -> None:
        number = self.random.choice(list(PROMPTS))
        if number in self.coming:
            return
        found = self.new.stepper.cancel([number]) + self.old.stepper.cancel([number])
        if found and number not in self.new.tokens and number not in self.old.tokens:
            self.cancelled.add(number)


@pytest.mark.parametrize("seed", range(24))
def test_any_order_of_arrivals_gives_the_same_tokens(model: Path, alone: Side, seed: int) -> None:
    order = Order(model, seed)
    order.run()
    new, old = order.new, order.old
    assert not new.failed and not old.failed
    assert not new.tokens.keys() & old.tokens.keys()
    for number, token in (new.tokens | old.tokens).items():
        assert token == alone.tokens[number]
    runs = new.layers_run + old.layers_run
    for number in set(PROMPTS) - order.cancelled:
        layers = [layer for one, layer in runs if one == number]
        if layers:  # else prefilled plainly, after the load
            assert layers == list(range(LAYERS))
    assert len(set(runs)) == len(runs), "no layer runs twice"
    kept = [number for number in order.came if number in order.took]
    assert order.took == kept, "in order of arrival"
    new.empty()
    old.empty()


def test_a_layer_that_arrives_sends_new_back_to_the_earliest(model: Path) -> None:
    """The zigzag, and what Old gets: the earliest, as soon as New is not in a layer of it."""
    new = Side(model, 1)
    for number in (1, 2, 3):
        new.prefill(number)
    while new.step():
        pass
    assert new.layers_run == [(1, 0), (2, 0), (3, 0)]
    new.live.ready = 2
    assert new.begin()
    new.end()
    assert new.layers_run[3:] == [(1, 1)]
    answers = []
    new.live.changed = lambda: answers.append(new.live.offered)
    new.live.ready = 3
    assert new.begin(), "in a layer of the first"
    assert new.live.ask() is None
    new.end()
    (one,) = answers
    assert one is not None and (one.id, one.done) == (1, 3)
    new.live.sent()
    with pytest.raises(NotHeld, match="request_id: 1 is on its way already"):
        new.live.ask()
    new.live.withdraw(1)
    assert new.live.waiting[0].id == 1, "its place is kept"
    with pytest.raises(NotHeld, match="request_id: 1 is not on its way"):
        new.stepper.acknowledged(1)


def test_old_takes_the_next_as_its_last_layer_begins_and_goes_on_without_a_pause(
    model: Path, alone: Side
) -> None:
    new, old = Side(model, 2), Side(model)
    for number in (1, 2):
        new.prefill(number)
    while new.step():
        pass
    told = []

    def ending() -> None:
        told.append(old.stepper.takes_more)
        if (one := new.live.ask()) is not None:
            relay(new, old, one)

    old.live.ending = ending
    one = new.live.ask()
    assert one is not None
    relay(new, old, one)
    assert not old.stepper.takes_more, "one waits already"
    assert old.begin() and not old.stepper.takes_more
    old.end()
    assert old.tokens == {1: alone.tokens[1]} and [one.id for one in old.live.taken] == [2]
    assert old.step() and old.stepper.idle
    assert old.tokens[2] == alone.tokens[2] and told == [True, True]
    new.empty()
    old.empty()


def test_best_effort_runs_the_layers_that_are_there_once(model: Path, alone: Side) -> None:
    new, old = Side(model, 2, policy=Policy.BEST_EFFORT), Side(model)
    for number in (1, 2):
        new.prefill(number)
    while new.step():
        pass
    assert new.layers_run == [(1, 0), (1, 1), (2, 0), (2, 1)]
    new.live.set_ready(3)
    new.prefill(3)
    while new.step():
        pass
    assert new.layers_run[4:] == [(2, 2), (3, 0), (3, 1), (3, 2)], "no zigzag back to 1"
    for number, done in ((1, 2), (2, 3), (3, 3)):
        one = new.live.ask()
        assert one is not None and (one.id, one.done) == (number, done)
        relay(new, old, one)
        assert old.step()
    assert old.tokens == {number: alone.tokens[number] for number in (1, 2, 3)}
    new.empty()
    old.empty()


def test_what_new_cannot_take_is_refused_and_leaks_nothing(model: Path) -> None:
    new = Side(model, 1)
    with pytest.raises(Refused, match="hold"):
        new.stepper.prefill(request(1, "x", 8), hold=False)
    with pytest.raises(Refused, match="prompt_logprobs"):
        new.stepper.prefill(request(1, "x", 8, prompt_logprobs=1), hold=True)
    moving = request(1, "x", 8)
    moving.output_tokens = [65]
    with pytest.raises(NoRoom, match="still arriving"):
        new.stepper.reserve(moving)
    new.prefill(1)
    with pytest.raises(Refused, match="request_id: 1 is here already"):
        new.prefill(1)
    for number in range(100, 115):
        new.stepper.prefill(request(number, "x", 8), hold=True)
    with pytest.raises(NoRoom, match=r"pending already|batch is full"):
        new.stepper.prefill(request(200, "x", 8), hold=True)
    new.stepper.reset()
    new.empty()


def test_a_request_cancelled_on_its_way_is_freed_when_its_bytes_are_there(model: Path) -> None:
    new, old = Side(model, 2), Side(model)
    new.prefill(1)
    while new.step():
        pass
    one = new.live.ask()
    assert one is not None
    taken = old.stepper.expect(one.request, one.done)
    assert old.stepper.cancel([1]) == 1 and old.stepper.request_ids == []
    assert taken.slot is not None and old.slots.free == 1, "still being written"
    with pytest.raises(Refused, match="request_id: 1 is here already"):
        old.stepper.expect(one.request, one.done)
    with pytest.raises(NotHeld, match="request_id: 1 was cancelled on its way"):
        old.live.arrived(1)
    old.empty()
    old.stepper.expect(one.request, one.done)
    old.live.never_came(1)
    old.empty()
    new.live.sent()
    assert new.stepper.cancel([1]) == 1
    with pytest.raises(NotHeld):
        new.stepper.acknowledged(1)
    new.empty()


def test_a_first_token_that_is_the_last_holds_nothing_at_old(model: Path, alone: Side) -> None:
    new, old = Side(model, 2), Side(model)
    new.prefill(1, max_tokens=1)
    while new.step():
        pass
    one = new.live.ask()
    assert one is not None
    relay(new, old, one)
    assert old.step()
    assert old.tokens[1] == alone.tokens[1] and old.finish[1] is pb.FinishReason.LENGTH
    assert old.stepper.request_ids == []
    old.empty()
    new.empty()


def test_a_failing_layer_ends_its_request_alone(
    model: Path, alone: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = Side(model, 2), Side(model)
    new.prefill(1)
    new.prefill(2)
    run_range = Executor.run_range

    def broken(self: Executor, plan, first, *rest):  # type: ignore[no-untyped-def]
        if plan.chunks[0].sequence.id == 1 and first == 1:
            raise RuntimeError("no such luck")
        return run_range(self, plan, first, *rest)

    monkeypatch.setattr(Executor, "run_range", broken)
    while new.step():
        pass
    assert list(new.failed) == [1] and "no such luck" in new.failed[1]
    one = new.live.ask()
    assert one is not None and one.id == 2
    relay(new, old, one)
    assert old.step() and old.tokens == {2: alone.tokens[2]}
    new.empty()
    old.empty()
