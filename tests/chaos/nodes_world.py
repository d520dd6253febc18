"""The seeded world with agents on other nodes: they are cut off, freeze, die with and without
their workers, take their leave; and the controller is killed and starts again from its log."""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio

from blitzd.control.core import CORE_VERSION
from blitzd.events import types as ev
from blitzd.events.record import Record
from blitzd.fsm import ClusterState
from blitzd.fsm.replaying import replay, state_of
from blitzd.node.driver import Driver
from blitzd.node.observe import new_observations
from tests.chaos.controller import LEASE_S, Controller, VirtualNode, Wire
from tests.chaos.lives import Lives
from tests.chaos.nodes import NodeWorkers
from tests.chaos.workers import VirtualWorkers
from tests.chaos.world import (
    SNAPSHOT_EVERY,
    VIRTUAL_LIMIT_S,
    VirtualClock,
    WatchedCore,
    World,
)

FAULTS = ("cut", "freeze", "agent", "node", "leave", "controller")
SHORT_S, LONG_S = 0.6 * LEASE_S, 3 * LEASE_S
"""Within a lease, and beyond."""


@dataclass(frozen=True)
class NodesScenario:
    offers: tuple[tuple[str, ...], ...]
    """Roles, by node."""
    faults: tuple[str, ...]

    @classmethod
    def draw(cls, random: Random) -> "NodesScenario":
        roles = ("prefill", "decode", "decode", "colocated", "spare")
        nodes = random.randint(1, 3)
        offers = tuple(tuple(random.choices(roles, k=random.randint(1, 3))) for _ in range(nodes))
        return cls(offers, tuple(random.choices(FAULTS, k=random.choice([0, 1, 2, 4, 8]))))


class NodeLives(Lives):
    """Who was under way when the controller died has failed; nobody else for that reason."""

    def see(self, record: Record) -> None:
        if isinstance(record.payload, ev.NodeStarted):
            self._boot = record.cause
        self._cause = record.cause
        super().see(record)

    def _may_fail(self, failed: ev.RequestFailed, now_ns: int) -> bool:
        if failed.code == "daemon_restarted":
            return self._cause == self._boot
        return super()._may_fail(failed, now_ns)


class NodesWorld(World):
    def __init__(self, seed: int, verbose: bool = False) -> None:
        super().__init__(seed, verbose)
        self.plan = NodesScenario.draw(self.random)
        offers = self.plan.offers
        self.described = seed % 3 > 0
        """What joins the nodes is in the configuration."""
        if self.described:
            # Of described links, several at once: these can be had in shards.
            offers = (("spare",) * 3, *offers[1:])
        self.nodes = {
            name: VirtualNode(name, tuple((f"{name}.r{i}", role) for i, role in enumerate(roles)))
            for name, roles in zip("bcd", offers, strict=False)
        }
        self.wire = Wire()
        self.boots = 0
        self.did: Counter[str] = Counter()
        """Faults, and what came of them."""
        self._life: anyio.CancelScope | None = None
        self._clients: dict[anyio.CancelScope, None] = {}

    def lives(self) -> Lives:
        return NodeLives(self.scenario.policy(self.seed), self.scenario.faults)

    async def run(self) -> None:
        with anyio.fail_after(VIRTUAL_LIMIT_S):
            async with anyio.create_task_group() as tasks, anyio.create_task_group() as virtual:
                faults = self.scenario.faults
                workers = NodeWorkers(self.wire, virtual, self.random, faults, self.nodes)
                self._boot(workers, tasks)
                for node in self.nodes.values():
                    virtual.start_soon(workers.agent, node)
                    virtual.start_soon(workers.fence, node)
                driver: Any = self.wire
                async with anyio.create_task_group() as life:
                    life.start_soon(self._break_things, workers)
                    life.start_soon(self._break_nodes, workers, tasks)
                    life.start_soon(self._operate, driver)
                    await self._arrivals(driver, life)
                await self._settle(workers)
                self._check_quiet(workers)
                await self.wire.post(ev.StopRequested("end of run", 2**62))
                await self._stopped()
                self.wire.controller = None
                virtual.cancel_scope.cancel()
        self._check_log()

    # The controller's lives.

    def _boot(self, workers: NodeWorkers, tasks: Any) -> None:
        state = ClusterState()
        if self.disk.snapshots:
            state = state_of(self.disk.snapshots[-1], ClusterState)
        replay(state, self.disk.records[state.seq :])
        self.core = WatchedCore(state)
        self.boots += 1
        driver = Driver(
            self.core,
            self.disk,
            VirtualClock(),
            new_observations(),
            draw_seed=lambda: self.random.getrandbits(32),
            first_request_id=(self.boots << 32) + 1,
            snapshot_every=SNAPSHOT_EVERY,
        )
        policy = self.scenario.policy(self.seed).pairs()
        mine = self.scenario.replicas
        adopted = workers.adopt_here(state)
        links = self._links() if self.described else ()
        boot = ev.Booted(self.boots, "test", "local", mine, policy, CORE_VERSION, adopted, links)
        controller = Controller(driver, driver.post)
        controller.mute |= {(replica, epoch) for replica, epoch, _ in adopted}
        controller.expect(state, anyio.current_time())
        self.wire.controller = controller
        tasks.start_soon(self._live, driver, workers, boot)
        tasks.start_soon(workers.leases, controller)

    def _links(self) -> tuple[ev.NodeLinks, ...]:
        """So many of each node that weights may come in shards."""
        names = sorted({"local", *self.nodes})
        return tuple(ev.NodeLinks(name, ("e0", "e1", "e2", "e3"), 10**9) for name in names)

    async def _live(self, driver: Driver, workers: NodeWorkers, boot: ev.Booted) -> None:
        with anyio.CancelScope() as self._life:
            await driver.run(workers, boot)

    async def _kill_controller(self, workers: NodeWorkers, tasks: Any) -> None:
        """As by SIGKILL: what it had not handed to the disk is gone, and so are the
        connections of its clients. Workers and agents go on."""
        assert self._life is not None
        assert self.core.refused == [], "decisions that the fold refused"
        assert self.wire.controller is not None
        lost = [r.payload for turn in self.wire.controller.driver._backlog for r in turn]
        self.outcome.finished -= sum(isinstance(p, ev.RequestFinished) for p in lost)
        self.wire.controller = None
        self._life.cancel()
        for client in list(self._clients):
            client.cancel()
        await anyio.sleep(self.random.choice([0.2, 2.0, SHORT_S, LONG_S]))
        self._boot(workers, tasks)

    async def _client(self, driver: Any) -> None:
        """Asks again when its connection broke."""
        cut = True
        while cut:
            while self.wire.controller is None:
                await anyio.sleep(0.1)
            with anyio.CancelScope() as connection:
                self._clients[connection] = None
                await super()._client(self.wire.controller.driver)
            del self._clients[connection]
            cut = connection.cancelled_caught
            self.did["asked again"] += cut

    # What breaks.

    async def _break_nodes(self, workers: NodeWorkers, tasks: Any) -> None:
        for what in self.plan.faults:
            await anyio.sleep(self.random.expovariate(0.3))
            self.did[what] += 1
            if what == "controller":
                await self._kill_controller(workers, tasks)
            else:
                node = self.random.choice(list(self.nodes.values()))
                workers.start(self._fault, workers, node, what)

        await self._restore()

    async def _operate(self, driver: Any) -> None:
        if self.described:
            await self._scale_out()
        await super()._operate(driver)
        await self._restore()

    async def _scale_out(self) -> None:
        """A node of spares at once, and back to without weights."""
        spares = [offer for node in self.nodes.values() for offer in node.offers]
        for _ in range(3):
            await anyio.sleep(self.random.expovariate(0.5))
            for replica_id, role in spares:
                if role == "spare":
                    await self.wire.post(ev.RoleRequested(replica_id, role))
                    await self.wire.post(ev.DeactivateRequested(replica_id))
            await self.wire.post(ev.ScaleRequested(1, 6))
            await anyio.sleep(self.random.expovariate(1.0))

    async def _restore(self) -> None:
        """What operators want in the end, whatever a controller that died has not heard."""
        offered = [offer for node in self.nodes.values() for offer in node.offers]
        for replica_id, role in (*self.scenario.replicas, *offered):
            await self.wire.post(ev.UndrainRequested(replica_id))
            await self.wire.post(ev.RoleRequested(replica_id, role))
        if self.scenario.commands or self.scenario.autoscale or self.described:
            roles = Counter(role for _, role in (*self.scenario.replicas, *offered))
            await self.wire.post(ev.ScaleRequested(roles["prefill"], roles["decode"]))

    async def _fault(self, workers: NodeWorkers, node: VirtualNode, what: str) -> None:
        if not node.works:
            return  # it has one already
        lasts = self.random.choice([SHORT_S, LONG_S]) * self.random.random()
        if what == "cut":
            node.linked = False
            await anyio.sleep(lasts)
            node.linked = True
        elif what == "freeze":
            workers.freeze(node)
            await anyio.sleep(lasts)
            workers.thaw(node)
        else:
            await workers.end_agent(node, what)
            await anyio.sleep(lasts)
            workers.start_agent(node)

    # What must hold.

    async def _settle(self, workers: VirtualWorkers) -> None:
        """Every node is back, and every replica has the role of its configuration."""
        while not (self.wire.controller and all(self._joined(n) for n in self.nodes.values())):
            await anyio.sleep(0.5)
        await anyio.sleep(1.0)  # what a node that froze has yet to tell of its workers
        await self._restore()
        await super()._settle(workers)

    def _joined(self, node: VirtualNode) -> bool:
        agent = self.core.state.agents.get(node.name)
        back = agent is not None and (agent.phase, agent.epoch) == ("present", node.epoch)
        return node.works and back and node.contact is self.wire.controller

    def _check_quiet(self, workers: VirtualWorkers) -> None:
        super()._check_quiet(workers)
        replicas = self.core.state.replicas.values()
        there = {(r.id, r.epoch) for r in replicas}
        assert {(w.replica, w.epoch) for w in workers.living()} == there, "a worker is left over"
        assert isinstance(workers, NodeWorkers)
        serving = {(r.id, r.epoch) for r in replicas if r.digest}
        assert serving <= workers.loaded, "a replica without its weights serves"

    def _check_log(self) -> None:
        super()._check_log()
        for record in self.disk.records:
            self.did[type(record.payload).__name__] += 1
