"""Every order in which a client's leaving, the workers' answers, the commands' arrival and the
lease's expiry can meet: a model check of one request on one prefill and one decode replica.

Commands reach each worker in the order in which they were given, but as late as they like;
answers reach the core in any order.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from blitzd.control import commands as cmd
from blitzd.control.core import Core
from blitzd.events import types as ev
from blitzd.events.record import Kind, Payload
from blitzd.fsm import ClusterState
from blitzd.fsm.invariants import violations
from tests.control.harness import MS, Harness

ENDS = (ev.RequestFinished, ev.RequestFailed, ev.RequestCancelled)
Key = tuple[str, int]
"""A worker and an attempt of the request there."""


@dataclass(frozen=True)
class World:
    state: bytes
    now: int
    queues: tuple[tuple[str, tuple[cmd.Command, ...]], ...] = (("r0", ()), ("r1", ()))
    answers: frozenset[Payload] = frozenset()
    prefilling: frozenset[Key] = frozenset()
    importing: frozenset[tuple[str, int, int]] = frozenset()
    """With its lease."""
    decoding: frozenset[Key] = frozenset()
    held: frozenset[Key] = frozenset()
    """Blocks that a worker has for an attempt: all that could leak."""
    sent: int = 0
    attempt: int = 0
    gone: bool = False
    """The client, as the driver knows."""
    leaves: int = 0
    expiries: int = 0
    ends: int = 0


@dataclass
class Checker:
    leaves: int
    expiries: int
    seen: set[World] = field(default_factory=set)
    reached: Counter[str] = field(default_factory=Counter)

    def explore(self, first: World) -> None:
        stack = [first]
        while stack:
            world = stack.pop()
            if world in self.seen:
                continue
            self.seen.add(world)
            successors = list(self.successors(world))
            if not successors:
                self.check_end(world)
            stack += successors

    def successors(self, world: World) -> Iterator[World]:
        busy = False
        for after in self.moves(world):
            busy = True
            yield after
        if world.leaves < self.leaves:
            self.reached[f"leave {self.phase(world)}"] += 1
            left = replace(world, leaves=world.leaves + 1, gone=True)
            yield self.step(left, ev.ClientLeft(1))
        state = ClusterState.decode(world.state)
        if state.leases and world.expiries < self.expiries:
            self.reached["expiry"] += 1
            late = replace(world, now=world.now + 2000 * MS, expiries=world.expiries + 1)
            yield self.step(late, ev.Ticked())
        if not busy and state.requests:
            # It waits for a back-off or a link, so for time.
            yield self.step(replace(world, now=world.now + 70_000 * MS), ev.Ticked())

    def moves(self, world: World) -> Iterator[World]:
        for worker, queue in world.queues:
            if queue:
                yield self.arrive(world, worker, queue)
        for answer in world.answers:
            rest = replace(world, answers=world.answers - {answer})
            yield self.step(rest, answer)
        for worker, attempt in world.prefilling:
            token = ev.FirstTokenProduced(worker, 1, 1)
            rest = replace(world, prefilling=world.prefilling - {(worker, attempt)})
            # The driver drops tokens of an attempt that is over.
            if attempt == world.attempt and not world.gone:
                rest = replace(rest, answers=rest.answers | {token}, sent=max(1, rest.sent))
            yield rest
        for worker, attempt, lease in world.importing:
            yield self.pull(world, worker, attempt, lease)
        for worker, attempt in world.decoding:
            key = (worker, attempt)
            rest = replace(world, decoding=world.decoding - {key}, held=world.held - {key})
            if attempt == world.attempt and not world.gone:
                done = ev.GenerationEnded(worker, 1, 1, "stop", 2, "00")
                rest = replace(rest, answers=rest.answers | {done})
            yield rest

    def pull(self, world: World, worker: str, attempt: int, lease: int) -> World:
        key, source = (worker, attempt), ("r0", attempt)
        rest = replace(world, importing=world.importing - {(worker, attempt, lease)})
        if source not in world.held or source in world.prefilling:
            lost = ev.ImportEnded(lease, 0, 0, "not_held", "r0/1: request 1 is not here")
            return replace(rest, answers=rest.answers | {lost}, held=rest.held - {key})
        there = ev.ImportEnded(lease, 1000, 10)
        return replace(rest, answers=rest.answers | {there}, decoding=rest.decoding | {key})

    def arrive(self, world: World, worker: str, queue: tuple[cmd.Command, ...]) -> World:
        command, rest = queue[0], queue[1:]
        queues = tuple((w, rest if w == worker else q) for w, q in world.queues)
        world = replace(world, queues=queues)
        attempt: int = getattr(command, "attempt", 0)
        key = (worker, attempt)
        wanted = attempt == world.attempt and not world.gone
        match command:
            case cmd.StartPrefill() if wanted:
                return replace(world, held=world.held | {key}, prefilling=world.prefilling | {key})
            case cmd.ImportKv() if wanted:
                pull = (worker, attempt, command.lease_id)
                return replace(world, held=world.held | {key}, importing=world.importing | {pull})
            case cmd.ReleaseKv() | cmd.CancelRequest():
                self.reached[type(command).__name__] += 1
                return replace(
                    world,
                    held=world.held - {key},
                    prefilling=world.prefilling - {key},
                    decoding=world.decoding - {key},
                    importing=frozenset(i for i in world.importing if i[:2] != key),
                )
            case _:
                return world

    def step(self, world: World, payload: Payload) -> World:
        core = Core(ClusterState.decode(world.state))
        before = core.state.requests.get(1)
        holders = {before.source, before.target} - {""} if before is not None else set()
        step = core.step(payload, world.now, 0, lambda _: world.sent)
        assert step.fault is None, step.fault
        assert violations(core.state) == []
        events = [r.payload for r in step.records if r.payload.kind is Kind.EVENT]
        ended = any(isinstance(event, ENDS) for event in events)
        if isinstance(payload, ev.ClientLeft) and before is not None:
            # Within one step: everything is on its way to be freed.
            told = {c.replica for c in step.commands if isinstance(c, cmd.CancelRequest)}
            assert told == holders
            assert ended and not core.state.requests and not core.state.leases
        resumed = sum(isinstance(event, ev.RequestResumed) for event in events)
        queues = dict(world.queues)
        for command in step.commands:
            target = getattr(command, "target", "") or getattr(command, "replica", "")
            queues[target] += (command,)
        return replace(
            world,
            state=core.state.encode(),
            queues=tuple(sorted(queues.items())),
            attempt=world.attempt + resumed,
            ends=world.ends + ended,
        )

    def phase(self, world: World) -> str:
        request = ClusterState.decode(world.state).requests.get(1)
        if request is None:
            return "ended"
        return request.state.value + (" leased" if request.lease_id else "")

    def check_end(self, world: World) -> None:
        state = ClusterState.decode(world.state)
        assert not state.requests and not state.leases
        assert world.held == frozenset(), "a worker keeps what nobody wants"
        assert all(state.blocks_reserved(r) == 0 for r in state.replicas)
        assert world.ends == 1, "not exactly one end"
        shown = state.to_json()["requests"]
        assert shown["finished"] + shown["failed"] + shown["cancelled"] == 1


@pytest.mark.parametrize("leaves", [0, 1, 2])
@pytest.mark.parametrize("expiries", [0, 1, 2])
def test_every_order_frees_everything_and_ends_once(leaves: int, expiries: int) -> None:
    """B.2 #30, #34, #35: abort, prefill finish, pull, lease, release, in every order."""
    start = Harness(lease_stall_ms=1000, max_resumes=1).serving("prefill", "decode")
    start.after(ms=1)
    checker = Checker(leaves, expiries)
    first = World(start.state.encode(), start.now)
    checker.explore(checker.step(first, ev.RequestArrived(1, 100, 64, 7, 0)))
    print(f"{len(checker.seen)} states; {dict(checker.reached)}")
    if leaves:
        phases = {"queued", "prefilling", "migrating leased", "decoding", "ended"}
        assert phases - {"queued"} <= {
            name.removeprefix("leave ") for name in checker.reached if name.startswith("leave")
        }
    if expiries:
        assert checker.reached["expiry"]
    assert checker.reached["ReleaseKv"]
