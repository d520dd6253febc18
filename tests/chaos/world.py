"""One seeded run of the unmodified driver in virtual time, with faults and checks.

Event lines of a run (`verbose`): `time seq type fields`, one a record.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import msgspec
import trio
from trio.testing import MockClock

from blitzd.control.core import CORE_VERSION, Core, Step
from blitzd.control.redecide import redecide
from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.events.snapshot import Snapshot
from blitzd.fsm import ClusterState, fold
from blitzd.fsm.invariants import violations
from blitzd.fsm.replaying import replay, state_of
from blitzd.node.driver import Driver
from blitzd.node.face import GenerateRequest, GenerationFailed, RequestRefused
from blitzd.node.observe import new_observations
from blitzd.node.ports import JournalUnavailable
from tests.chaos.jobs import token_at
from tests.chaos.lives import Lives
from tests.chaos.scenario import Faults, Scenario
from tests.chaos.workers import VirtualWorkers

VIRTUAL_LIMIT_S = 600.0
SNAPSHOT_EVERY = 100
ROLES = ("prefill", "decode")


class VirtualClock:
    def mono_ns(self) -> int:
        return int(anyio.current_time() * 1e9)

    def wall_ns(self) -> int:
        return 1_700_000_000_000_000_000 + self.mono_ns()


class VirtualDisk:
    """A journal in memory whose disk may be full for a while."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.snapshots: list[Snapshot] = []
        self.full = False

    def append(self, records: Sequence[Record]) -> None:
        if self.full:
            raise JournalUnavailable("no space left on device")
        self.records += records

    async def sync(self) -> None:
        await anyio.sleep(0.0005)
        if self.full:
            raise JournalUnavailable("no space left on device")

    @property
    def snapshot_seq(self) -> int:
        return self.snapshots[-1].seq if self.snapshots else 0

    async def snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.seq <= len(self.records), "ahead of its log"
        await anyio.sleep(0.01)
        if self.full:
            raise JournalUnavailable("no space left on device")
        self.snapshots.append(snapshot)


@dataclass
class Outcome:
    """What the clients saw."""

    accepted: int = 0
    refused: int = 0
    finished: int = 0
    failed: list[str] = field(default_factory=list)
    left: int = 0
    tokens: int = 0


class WatchedCore(Core):
    """Notes what the daemon only logs: a decision that the fold refuses is a defect."""

    def __init__(self, state: ClusterState) -> None:
        super().__init__(state)
        self.refused: list[tuple[Payload, Exception]] = []

    def step(self, payload: Payload, *rest: Any) -> Step:
        step = super().step(payload, *rest)
        if step.fault is not None:
            self.refused.append((payload, step.fault))
        return step


class World:
    pairs_of = 3
    """One run in so many has live pairs."""

    def __init__(self, seed: int, verbose: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.scenario = Scenario.draw(self.random)
        if (seed + 1) % self.pairs_of == 0:
            self.scenario = self.scenario.with_pairs(self.random)
        elif seed % 4 == 1:
            self.scenario = self.scenario.with_pool(self.random)
        self.outcome = Outcome()
        self.disk = VirtualDisk()
        self.verbose = verbose
        self.core = WatchedCore(ClusterState())

    async def run(self) -> None:
        scenario = self.scenario
        driver = Driver(
            self.core,
            self.disk,
            VirtualClock(),
            new_observations(),
            draw_seed=lambda: self.random.getrandbits(32),
            first_request_id=1,
            snapshot_every=SNAPSHOT_EVERY,
        )
        with anyio.fail_after(VIRTUAL_LIMIT_S):
            async with anyio.create_task_group() as tasks, anyio.create_task_group() as virtual:
                workers = VirtualWorkers(driver, virtual, self.random, scenario.faults)
                policy = scenario.policy(self.seed).pairs()
                boot = ev.Booted(1, "test", "local", scenario.replicas, policy, CORE_VERSION)
                tasks.start_soon(driver.run, workers, boot)
                async with anyio.create_task_group() as life:
                    life.start_soon(self._break_things, workers)
                    life.start_soon(self._operate, driver)
                    life.start_soon(self._unite, driver)
                    await self._arrivals(driver, life)
                await self._settle(workers)
                self._check_quiet(workers)
                await driver.post(ev.StopRequested("end of run", 2**62))
                await self._stopped()
                virtual.cancel_scope.cancel()
        self._check_log()

    def lives(self) -> Lives:
        return Lives(self.scenario.policy(self.seed), self.scenario.faults)

    # What clients do.

    async def _arrivals(self, driver: Driver, life: Any) -> None:
        for _ in range(self.scenario.requests):
            await anyio.sleep(self.random.expovariate(self.scenario.rate))
            life.start_soon(self._client, driver)

    async def _client(self, driver: Driver) -> None:
        random = self.random
        request = GenerateRequest(
            prompt_tokens=tuple(range(random.choice([1, 63, 64, 65, 300]))),
            max_tokens=random.choice([1, 2, 10, 60, 200]),
            temperature=1.0,
            deadline_ms=random.choice([None] * 19 + [2000]),
            recompute=random.random() < 0.95,
        )
        patience = None
        if random.random() < self.scenario.leavers:
            patience = random.uniform(0.0, 2.0)
        with anyio.move_on_after(patience) as scope:
            await self._read(driver, request)
        if scope.cancelled_caught:
            self.outcome.left += 1

    async def _read(self, driver: Driver, request: GenerateRequest) -> None:
        try:
            generation = await driver.generate(request)
        except RequestRefused as refusal:
            assert str(refusal)
            self.outcome.refused += 1
            return
        except GenerationFailed as failure:
            self.outcome.failed.append(failure.code)
            return
        self.outcome.accepted += 1
        seen: list[int] = []
        finish = None
        try:
            async for delta in generation:
                assert finish is None, "nothing comes after the end"
                seen += delta.token_ids
                finish = delta.finish
        except GenerationFailed as failure:
            assert str(failure), "an end without a reason"
            self.outcome.failed.append(failure.code)
        else:
            assert finish == "length"
            assert len(seen) == request.max_tokens
            self.outcome.finished += 1
        finally:
            await self._leave(generation)
            self.outcome.tokens += len(seen)
            expected = [token_at(generation.seed, i) for i in range(len(seen))]
            assert seen == expected, f"request {generation.request_id}: wrong tokens"

    async def _leave(self, generation: Any) -> None:
        with anyio.CancelScope(shield=True):
            await generation.cancel()

    # What breaks.

    async def _break_things(self, workers: VirtualWorkers) -> None:
        scenario = self.scenario
        breaks = ["kill"] * scenario.kills + ["hang"] * scenario.hangs
        breaks += ["slow"] * scenario.slow + ["disk_full"] * scenario.disk_full
        self.random.shuffle(breaks)
        for what in breaks:
            await anyio.sleep(self.random.expovariate(0.5))
            living = workers.living()
            if what == "disk_full":
                self.disk.full = True
                await anyio.sleep(self.random.uniform(0.1, 5.0))
                self.disk.full = False
            elif living:
                worker = self.random.choice(living)
                if what == "kill":
                    workers.kill(worker, "killed by SIGKILL")
                elif what == "hang":
                    workers.hang(worker)
                else:
                    worker.slowness = 10.0

    # What operators do.

    async def _operate(self, driver: Driver) -> None:
        random = self.random
        replicas = [replica_id for replica_id, _ in self.scenario.replicas]
        for _ in range(self.scenario.commands):
            await anyio.sleep(random.expovariate(1.0))
            chosen = random.choice(replicas)
            command: Payload = random.choice(
                [
                    ev.DrainRequested(chosen, random.choice([0, driver.last_turn_ns + 10**9])),
                    ev.UndrainRequested(chosen),
                    ev.RoleRequested(chosen, random.choice([*ROLES, "colocated", "spare"])),
                    ev.DeactivateRequested(chosen),
                    ev.ScaleRequested(random.randint(0, 3), random.randint(0, 3)),
                    ev.ReleaseRequested(),
                    ev.RemoveRequested(chosen),
                    ev.RestartRequested(chosen, random.choice([0, 1, 1000])),
                    ev.RollingRestartRequested(random.choice([0, 3000])),
                    ev.RollingRestartStopRequested(),
                    ev.PolicyRequested((("null_ttl_ms", random.choice([0, 500, 30_000])),)),
                ]
            )
            await driver.post(command)
        # Whatever they did, in the end they want a service that works.
        for replica_id, role in self.scenario.replicas:
            await driver.post(ev.UndrainRequested(replica_id))
            await driver.post(ev.RoleRequested(replica_id, role))
        if self.scenario.commands:
            counts = [sum(r == role for _, r in self.scenario.replicas) for role in ROLES]
            await driver.post(ev.ScaleRequested(*counts))

    async def _unite(self, driver: Driver) -> None:
        replicas = [replica_id for replica_id, _ in self.scenario.replicas]
        for _ in range(self.scenario.unions):
            await anyio.sleep(self.random.expovariate(1.0))
            states = self.core.state.replicas
            inactive = [r for r in states if states[r].state == "Inactive"]
            prefills = [r for r in states if states[r].state == "Prefill"]
            new, old = (self.random.choice(those or replicas) for those in (inactive, prefills))
            await driver.post(ev.LivePairRequested(new, old))

    # What must hold.

    async def _settle(self, workers: VirtualWorkers) -> None:
        """Waits until everything accepted has ended and every replica serves again."""
        leaks = workers.faults.leak > 0
        workers.faults = Faults()
        while not self._settled() or any(
            # What has leaked is for the audit to find.
            w.hung or (leaks and w.holdings)
            for w in workers.living()
        ):
            await anyio.sleep(1.0)
        await anyio.sleep(1.0)

    def _settled(self) -> bool:
        state = self.core.state
        states = {"prefill": "Prefill", "decode": "Decode", "colocated": "Colocated"}
        restarting = any(r.restart_epoch or r.stands_in for r in state.replicas.values())
        busy = state.requests or restarting or state.node.rolling or state.pairs
        return not busy and all(
            r.worker == "attached" and (r.role == "spare" or r.state == states[r.role])
            for r in state.replicas.values()
        )

    def _check_quiet(self, workers: VirtualWorkers) -> None:
        shown = self.core.state.to_json()
        kv = [link for link in shown["links"] if link["carries"] == "kv"]
        assert kv == [], "a lease is left"
        for replica in shown["replicas"]:
            busy = (replica["inflight"], replica["blocks_reserved"], replica["blocks_used"])
            assert busy == (0, 0, 0), f"{replica['id']} is not idle: {replica}"
        for worker in workers.living():
            assert not worker.holdings, f"{worker.replica}/{worker.epoch} holds {worker.holdings}"
        ended = shown["requests"]
        total = sum(ended.values())
        assert total == self.core_requests(), f"{ended}: not every arrival has one end"
        assert ended["finished"] >= self.outcome.finished

    def core_requests(self) -> int:
        kinds = (ev.RequestAccepted, ev.RequestRejected)
        return sum(isinstance(r.payload, kinds) for r in self.disk.records)

    async def _stopped(self) -> None:
        while self.core.state.node.phase != "stopped":
            await anyio.sleep(0.1)

    def _check_log(self) -> None:
        assert self.core.refused == [], "decisions that the fold refused"
        state = ClusterState()
        ends: dict[int, int] = {}
        lives = self.lives()
        for record in self.disk.records:
            if self.verbose:
                print(line(record))
            fold(state, record)
            assert violations(state) == []
            lives.see(record)
            if isinstance(record.payload, ENDS):
                ends[record.payload.request_id] = ends.get(record.payload.request_id, 0) + 1
        assert state.hash() == self.core.state.hash(), "the log folds to another state"
        self._check_snapshots(state)
        again = redecide(self.disk.records)
        assert again.difference is None, again.difference
        assert all(count == 1 for count in ends.values()), "a request has ended twice"

    def _check_snapshots(self, whole: ClusterState) -> None:
        """Each, with the records after it, gives what all records give."""
        assert self.disk.snapshot_seq == len(self.disk.records), "none at the stop"
        for snapshot in self.disk.snapshots:
            state = state_of(snapshot, ClusterState)
            replay(state, self.disk.records[snapshot.seq :])
            assert (state.hash(), state.encode()) == (whole.hash(), whole.encode()), snapshot.seq


class PairsWorld(World):
    pairs_of = 1


ENDS = (ev.RequestFinished, ev.RequestFailed, ev.RequestCancelled, ev.RequestRejected)


def line(record: Record) -> str:
    """One compact line an event: seconds, sequence, cause, type, fields."""
    payload = record.payload
    values = msgspec.structs.asdict(payload).items()
    fields = " ".join(f"{name}={json.dumps(msgspec.to_builtins(v))}" for name, v in values)
    kind = type(payload).__name__
    return f"{record.mono_ns / 1e9:9.3f} {record.seq:6d} <{record.cause:6d} {kind} {fields}"


def run_seed(seed: int, verbose: bool = False, kind: type[World] = World) -> World:
    """Repeats exactly: trio's own shuffling is seeded too."""
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[attr-defined]
    trio._core._run._r.seed(seed)  # type: ignore[attr-defined]
    world = kind(seed, verbose)
    anyio.run(
        world.run,
        backend="trio",
        backend_options={"clock": MockClock(autojump_threshold=0)},
    )
    return world
