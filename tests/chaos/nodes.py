"""Virtual agents on virtual nodes, and a controller that may die: the shape of `node.hub`,
`node.workers_afar` and `node.agent` in virtual time.

Commands to workers and their answers wait while their node is cut off, as over TCP; spawning
and ending goes by the node's agent, which has to be in contact.
"""

from collections.abc import Awaitable, Callable
from random import Random

import anyio
from anyio.abc import TaskGroup

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm import ClusterState, ReplicaState
from blitzd.node.daemon import ADOPTED
from blitzd.node.live import LiveRequest
from tests.chaos.controller import (
    ANSWER_S,
    BEATS,
    DIGEST,
    DYING_S,
    LEASE_S,
    ON_THE_WAY_S,
    Controller,
    Key,
    VirtualNode,
    Wire,
)
from tests.chaos.workers import (
    BLOCK_TOKENS,
    BLOCKS,
    LAYERS,
    Faults,
    Job,
    VirtualWorker,
    VirtualWorkers,
)


def _left(lease_s: float) -> float:
    tick_s = LEASE_S / (4 * BEATS)
    return min(lease_s, tick_s) if lease_s > 0 else tick_s


class NodeWorkers(VirtualWorkers):
    """Workers here and on other nodes; these outlive the controller too."""

    def __init__(
        self,
        wire: Wire,
        tasks: TaskGroup,
        random: Random,
        faults: Faults,
        nodes: dict[str, VirtualNode],
    ) -> None:
        super().__init__(wire, tasks, random, faults)  # type: ignore[arg-type]
        self.wire = wire
        self.nodes = nodes
        self.loaded: set[Key] = set()
        self.answered: set[Key] = set()
        wire.reach = self._reach

    def node_of(self, replica: str) -> VirtualNode | None:
        name, dot, _ = replica.partition(".")
        return self.nodes[name] if dot else None

    def there(self, node: VirtualNode) -> list[VirtualWorker]:
        return [w for w in self.living() if self.node_of(w.replica) is node]

    # Commands.

    def perform(self, command: cmd.Command, live: LiveRequest | None) -> None:
        replica = getattr(command, "replica", "") or getattr(command, "target", "")
        node = self.node_of(replica)
        if isinstance(command, cmd.SpawnWorker):
            key = (command.replica, command.epoch)
            assert key not in self.workers, "an identity is used twice"
            assert command.node == ("" if node is None else node.name)
        if isinstance(command, cmd.ResetWorker) and command.unload:
            self.loaded.discard((command.replica, command.epoch))
        life = self.wire.controller
        if isinstance(command, cmd.ResetWorker) and life is not None:
            self._watch(life, (command.replica, command.epoch))
        if node is None or life is None:
            super().perform(command, live)
        elif isinstance(command, cmd.SpawnWorker):
            self._spawn_afar(life, node, command)
        elif isinstance(command, cmd.EndWorker):
            self._end_afar(life, node, command)
        elif node.linked:
            super().perform(command, live)
        else:
            self._tasks.start_soon(self._perform_later, life, node, command, live)

    def _watch(self, life: Controller, key: Key) -> None:
        """A watch begins with how full the worker is."""
        worker = self.workers.get(key)
        if key in life.mute and worker is not None:
            life.mute.discard(key)
            self._tasks.start_soon(self._occupancy, worker)

    async def _perform_later(
        self, life: Controller, node: VirtualNode, command: cmd.Command, live: LiveRequest | None
    ) -> None:
        while not node.linked:
            await anyio.sleep(0.05)
        if life is self.wire.controller:
            super().perform(command, live)

    def _spawn_afar(self, life: Controller, node: VirtualNode, command: cmd.SpawnWorker) -> None:
        key = (command.replica, command.epoch)
        life.known[key] = node.name
        if node.contact is life:  # else its next hello does not have it
            self._tasks.start_soon(self._spawn_there, life, node, key)

    async def _told(self, life: Controller, node: VirtualNode) -> bool:
        """What goes over a contact arrives, if late, or the contact ends, as with its agent."""
        epoch = node.epoch
        await anyio.sleep(self.random.uniform(0.0, 0.02))
        while node.contact is life and node.epoch == epoch and not node.works:
            await anyio.sleep(0.05)
        return node.contact is life and node.epoch == epoch

    async def _spawn_there(self, life: Controller, node: VirtualNode, key: Key) -> None:
        if await self._told(life, node):
            worker = self.workers[key] = VirtualWorker(*key)
            self._tasks.start_soon(self._life, worker)

    def _end_afar(self, life: Controller, node: VirtualNode, command: cmd.EndWorker) -> None:
        key = (command.replica, command.epoch)
        if key not in life.known:
            return
        if not command.report:
            del life.known[key]
        if node.contact is life:
            self._tasks.start_soon(self._end_there, life, node, key)
            self._tasks.start_soon(self._give_up_on, life, key, ANSWER_S)
        else:
            why = "its node is out of contact"
            self._tasks.start_soon(self._exited, life, key, why)

    async def _end_there(self, life: Controller, node: VirtualNode, key: Key) -> None:
        if await self._told(life, node):
            worker = self.workers.get(key)
            if worker is not None and worker.alive:
                self._end(worker)
            await self._exited(life, key, "exited with status 0")

    async def _give_up_on(self, life: Controller, key: Key, after_s: float) -> None:
        await anyio.sleep(after_s)
        await self._exited(life, key, "its node is out of contact")

    async def _exited(self, life: Controller, key: Key, reason: str) -> None:
        """The pool hears of the end of a worker."""
        if life.known.pop(key, None) is not None:
            await life.post(ev.WorkerExited(*key, reason))

    # Answers.

    async def _reach(self, replica: str, epoch: int) -> None:
        node = self.node_of(replica)
        while node is not None and not node.linked:
            await anyio.sleep(0.05)

    async def post(self, worker: VirtualWorker, payload: Payload, certain: bool = False) -> None:
        key = (worker.replica, worker.epoch)
        if isinstance(payload, ev.LoadEnded) and not payload.reason:
            self.loaded.add(key)
        if isinstance(payload, ev.WorkerDescribed):
            self.answered.add(key)
        life = self.wire.controller
        await self._reach(worker.replica, worker.epoch)
        if life is None or life is not self.wire.controller:
            return
        if isinstance(payload, ev.WorkerFound) or life.hears(key):
            await super().post(worker, payload, certain)

    async def _report_death(self, worker: VirtualWorker, reason: str) -> None:
        node, life = self.node_of(worker.replica), self.wire.controller
        if node is None:
            await super()._report_death(worker, reason)
            return
        await anyio.sleep(self.random.uniform(0.001, 0.1))
        if life is None:
            return
        key = (worker.replica, worker.epoch)
        if node.linked:  # its token stream breaks, so it is killed, whoever answers
            after_s = DYING_S + (ANSWER_S if node.contact is life else 0.0)
            self._tasks.start_soon(self._give_up_on, life, key, after_s)
        if await self._told(life, node):
            await self._exited(life, key, reason)

    async def _import(self, worker: VirtualWorker, command: cmd.ImportKv, job: Job) -> None:
        """Nothing comes over a link that is cut, and nobody says so."""
        ends = {self.node_of(command.source), self.node_of(command.target)}
        if len(ends) > 1 and not all(node is None or node.linked for node in ends):
            worker.holdings[job.id] = 1
        else:
            await super()._import(worker, command, job)

    def _gives(self, replica: str, epoch: int) -> bool:
        node = self.node_of(replica)
        return (node is None or node.linked) and super()._gives(replica, epoch)

    # Agents.

    async def agent(self, node: VirtualNode) -> None:
        """For ever: its beats, and its way back into contact."""
        while True:
            await anyio.sleep(self.random.uniform(0.5, 1.0) * LEASE_S / BEATS)
            life, now = self.wire.controller, anyio.current_time()
            if not node.works or life is None:
                continue
            if node.contact is not life:
                await self._hello(life, node)
            elif node.name in life.heard:
                life.heard[node.name] = now + ON_THE_WAY_S
                node.lease_until = now + LEASE_S

    async def fence(self, node: VirtualNode) -> None:
        """For ever: without a lease there are no workers."""
        while True:
            self._look_at_the_clock(node)
            until = node.lease_until
            left_s = 0.0 if until is None else until - anyio.current_time()
            await anyio.sleep(_left(left_s))

    def _look_at_the_clock(self, node: VirtualNode) -> None:
        over = node.lease_until is not None and anyio.current_time() >= node.lease_until
        if over and node.alive and not node.frozen:
            node.lease_until = node.contact = None
            for worker in self.there(node):
                self._end(worker)

    async def _hello(self, life: Controller, node: VirtualNode) -> None:
        now = anyio.current_time()
        life.awaited.pop(node.name, None)
        life.heard[node.name], life.epochs[node.name] = now + ON_THE_WAY_S, node.epoch
        live = {key for w in self.there(node) if (key := (w.replica, w.epoch)) in self.answered}
        kept = {key for key, name in life.known.items() if name == node.name and key in live}
        gone = [key for key, name in life.known.items() if name == node.name and key not in live]
        for key in life.expected.pop(node.name, set()):
            life.known[key] = node.name
            if key in live:
                kept.add(key)
                life.mute.add(key)
                self._tasks.start_soon(self._find, life, node, key)
            else:
                gone.append(key)
        for worker in self.there(node):
            if (worker.replica, worker.epoch) not in kept:
                self._end(worker)
        node.contact, node.lease_until = life, now + LEASE_S
        for key in gone:
            self._tasks.start_soon(self._exited, life, key, "not there when its node was back")
        joined = ev.AgentJoined(node.name, node.epoch, "10.0.0.2", "test", "x", 1, 1, node.offers)
        await life.post(joined)

    async def _find(self, life: Controller, node: VirtualNode, key: Key) -> None:
        await anyio.sleep(self.random.uniform(0.0, 0.1))
        worker = self.workers[key]
        await self.pause(worker, 0.01)
        await self._reach(*key)
        if not worker.alive or life is not self.wire.controller:
            return
        layers, blocks = (LAYERS, BLOCKS) if key in self.loaded else (0, 0)
        digest = DIGEST if layers else ""
        found = ev.WorkerFound(*key, 1, digest, layers, layers * 10, BLOCK_TOKENS, blocks)
        await self.post(worker, found, certain=True)

    # Faults.

    def start(self, work: Callable[..., Awaitable[None]], *args: object) -> None:
        self._tasks.start_soon(work, *args)

    def freeze(self, node: VirtualNode) -> None:
        node.frozen = True
        for worker in self.there(node):
            worker.hung = True

    def thaw(self, node: VirtualNode) -> None:
        node.frozen = False
        self._look_at_the_clock(node)
        for worker in self.there(node):
            worker.hung = False

    async def end_agent(self, node: VirtualNode, what: str) -> None:
        """agent: killed alone; node: with its workers; leave: told to stop."""
        life = self.wire.controller
        if what == "leave" and life is not None and node.contact is life:
            await self.lose(life, node.name, "its agent stops: SIGTERM")
        node.alive, node.contact = False, None
        if what != "agent":
            for worker in self.there(node):
                self.kill(worker, "its machine died")

    def start_agent(self, node: VirtualNode) -> None:
        node.alive, node.epoch, node.since = True, node.epoch + 1, anyio.current_time()
        node.lease_until = node.since + LEASE_S if self.there(node) else None

    # The controller's side.

    async def leases(self, life: Controller) -> None:
        """For as long as the controller lives: nodes that are not heard of are lost."""
        while life is self.wire.controller:
            await anyio.sleep(LEASE_S / 20)
            now = anyio.current_time()
            for name, heard in list(life.heard.items()):
                if now - heard >= LEASE_S:
                    self._check_fence(self.nodes[name], heard)
                    await self.lose(life, name, f"not heard of for {LEASE_S:g} s")
            for name, until in list(life.awaited.items()):
                if now >= until:
                    del life.awaited[name]
                    life.expected.pop(name, None)
                    why = "not back after the controller's restart"
                    await life.post(ev.AgentLost(name, life.epochs[name], why))

    async def lose(self, life: Controller, name: str, reason: str) -> None:
        del life.heard[name]
        if self.nodes[name].contact is life:
            self.nodes[name].contact = None
        await life.post(ev.AgentLost(name, life.epochs[name], reason))

    def _check_fence(self, node: VirtualNode, heard: float) -> None:
        """An agent that runs has ended its workers before its node is lost; one that was
        started again meanwhile may have them, and is told at its hello."""
        if node.alive and not node.frozen and node.since < heard:
            assert self.there(node) == [], f"{node.name} is not fenced"

    def adopt_here(self, state: ClusterState) -> tuple[tuple[str, int, int], ...]:
        """As the daemon does with its own workers before it boots."""
        adopted = []
        for replica in state.replicas.values():
            if not replica.pid or self.node_of(replica.id) is not None:
                continue
            worker = self.workers.get((replica.id, replica.epoch))
            if worker is None or not worker.alive:
                continue
            wanted = replica.state in ADOPTED
            has = (replica.id, replica.epoch) in self.loaded
            if (wanted and has) or (replica.state is ReplicaState.INACTIVE and not has):
                adopted.append((replica.id, replica.epoch, replica.pid))
            else:
                self._end(worker)
        return tuple(adopted)
