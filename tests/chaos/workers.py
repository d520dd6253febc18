"""Virtual workers: the same commands and answers as real ones, with virtual compute.

A worker is a set of KV holdings and a task group. Its tokens are a function of the request
(seed and position), so that a client can be checked for missing, repeated or wrong ones.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import anyio
from anyio.abc import TaskGroup

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.node.driver import Driver
from blitzd.node.live import LiveRequest
from blitzd.proto.blitzd.engine import v1 as pb

BLOCK_TOKENS = 64
BLOCKS = 24
LAYERS = 4
STEP_S = 0.01
HANG_DEADLINE_S = 10.0
F = pb.FinishReason


def token_at(seed: int, position: int) -> int:
    return (seed * 1_000_003 + position * 7919) % 50_000


@dataclass(eq=False)
class VirtualWorker:
    replica: str
    epoch: int
    group: TaskGroup | None = None
    alive: bool = True
    hung: bool = False
    slowness: float = 1.0
    holdings: dict[int, int] = field(default_factory=dict)
    """Request id -> KV blocks: all that a worker could leak."""

    @property
    def blocks_used(self) -> int:
        return sum(self.holdings.values())


@dataclass
class Faults:
    """Probabilities per opportunity."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    engine_error: float = 0.0
    no_room: float = 0.0
    load_failure: float = 0.0


class VirtualWorkers:
    """`ports.Workers` in virtual time."""

    def __init__(self, driver: Driver, tasks: TaskGroup, random: Random, faults: Faults) -> None:
        self.faults = faults
        self.workers: dict[tuple[str, int], VirtualWorker] = {}
        self._driver = driver
        self._tasks = tasks
        self._random = random

    def living(self) -> list[VirtualWorker]:
        return [w for w in self.workers.values() if w.alive]

    def perform(self, command: cmd.Command, live: LiveRequest | None) -> None:
        match command:
            case cmd.SpawnWorker():
                worker = VirtualWorker(command.replica, command.epoch)
                self.workers[command.replica, command.epoch] = worker
                self._tasks.start_soon(self._life, worker)
            case cmd.EndWorker():
                self._with(command, lambda worker: self._end_as_told(worker, command.report))
            case cmd.ResetWorker():
                self._with(command, lambda worker: worker.holdings.clear())
            case cmd.DecodeLocally():
                if live is not None:
                    self._run(command, self._decode, live)
            case cmd.LoadModel():
                self._run(command, self._load)
            case cmd.StartPrefill():
                if live is not None:
                    self._run(command, self._prefill, live, command.hold)
            case cmd.ImportKv():
                if live is not None:
                    target = cmd.LoadModel(command.target, command.target_epoch)
                    self._run(target, self._import, command, live)
            case cmd.ReleaseKv() | cmd.CancelRequest():
                self._run(command, self._free, command.request_id)
            case cmd.ShutDown():
                pass

    def _with(self, command: object, action: Callable[[VirtualWorker], None]) -> None:
        worker = self.workers.get((command.replica, command.epoch))  # type: ignore[attr-defined]
        if worker is not None and worker.alive:
            action(worker)

    def _run(self, command: object, work: Callable[..., Awaitable[None]], *args: object) -> None:
        def start(worker: VirtualWorker) -> None:
            if worker.group is not None:
                worker.group.start_soon(work, worker, *args)

        self._with(command, start)

    # Life and death.

    async def _life(self, worker: VirtualWorker) -> None:
        async with anyio.create_task_group() as worker.group:
            await self._post(worker, ev.WorkerStarted(worker.replica, worker.epoch, 1))
            await self._pause(worker, 0.5)
            await self._post(worker, ev.WorkerDescribed(worker.replica, worker.epoch, 1), True)
            await anyio.sleep_forever()

    def _end(self, worker: VirtualWorker) -> None:
        worker.alive = False
        worker.holdings.clear()
        if worker.group is not None:
            worker.group.cancel_scope.cancel()

    def _end_as_told(self, worker: VirtualWorker, report: bool) -> None:
        if report:
            self.kill(worker, "exited with status 0")
        else:
            self._end(worker)

    def kill(self, worker: VirtualWorker, reason: str) -> None:
        if worker.alive:
            self._end(worker)
            self._tasks.start_soon(self._report_death, worker, reason)

    async def _report_death(self, worker: VirtualWorker, reason: str) -> None:
        await anyio.sleep(self._random.uniform(0.001, 0.1))
        await self._driver.post(ev.WorkerExited(worker.replica, worker.epoch, reason))

    def hang(self, worker: VirtualWorker) -> None:
        """It stops answering; the watchdog ends it."""
        worker.hung = True
        self._tasks.start_soon(self._end_hung, worker)

    async def _end_hung(self, worker: VirtualWorker) -> None:
        await anyio.sleep(HANG_DEADLINE_S)
        self.kill(worker, f"silent for {HANG_DEADLINE_S:.0f} s")

    async def _pause(self, worker: VirtualWorker, mean_s: float) -> None:
        await anyio.sleep(worker.slowness * self._random.uniform(0.5, 1.5) * mean_s)
        while worker.hung:
            await anyio.sleep(1.0)

    # Answers. A gRPC stream or call is reliable while its worker lives; what may be lost,
    # late or double is the answer of a call (`certain=False`).

    async def _post(self, worker: VirtualWorker, payload: Payload, certain: bool = False) -> None:
        if not certain and self._random.random() < self.faults.drop:
            return
        if not certain and self._random.random() < self.faults.delay:
            await self._pause(worker, 0.3)
        await self._driver.post(payload)
        if self._random.random() < self.faults.duplicate:
            await self._driver.post(payload)

    async def _token(self, worker: VirtualWorker, live: LiveRequest, at: int, finish: F) -> None:
        report = pb.StepReport(
            request_ids=[live.request_id],
            token_ids=[token_at(live.seed, at)],
            texts=[f" {at}"],
            finish=[finish],
            running=len(worker.holdings),
            blocks_used=worker.blocks_used,
            blocks_total=BLOCKS,
        )
        await self._driver.deliver(worker.replica, worker.epoch, report)

    async def _occupancy(self, worker: VirtualWorker) -> None:
        report = pb.StepReport(running=len(worker.holdings), blocks_used=worker.blocks_used)
        await self._driver.deliver(worker.replica, worker.epoch, report)

    # Commands.

    async def _load(self, worker: VirtualWorker) -> None:
        on = (worker.replica, worker.epoch)
        for layers in range(LAYERS):
            await self._pause(worker, 0.1)
            moved = ev.LoadMoved(*on, layers, LAYERS, layers * 10, LAYERS * 10)
            await self._post(worker, moved)
        failed = self._random.random() < self.faults.load_failure
        reason = "digest differs" if failed else ""
        ended = ev.LoadEnded(*on, "d", "map", LAYERS, LAYERS * 10, BLOCK_TOKENS, BLOCKS, reason)
        await self._post(worker, ended, certain=True)

    async def _prefill(self, worker: VirtualWorker, live: LiveRequest, hold: bool) -> None:
        prompt = len(live.request.prompt_tokens)
        worker.holdings[live.request_id] = -(-(prompt + 1) // BLOCK_TOKENS)
        await self._pause(worker, 0.0005 * prompt)
        if live.request_id not in worker.holdings:
            return
        if self._random.random() < self.faults.engine_error:
            del worker.holdings[live.request_id]
            errored = (worker.replica, worker.epoch, live.request_id, "NaN in logits")
            await self._post(worker, ev.RequestErrored(*errored), certain=True)
            return
        if live.request.max_tokens == 1:
            del worker.holdings[live.request_id]
            await self._token(worker, live, 0, F.LENGTH)
        elif hold:
            await self._token(worker, live, 0, F.HELD)
        else:
            await self._token(worker, live, 0, F.NONE)
            await self._decode(worker, live)

    async def _import(
        self, worker: VirtualWorker, command: cmd.ImportKv, live: LiveRequest
    ) -> None:
        source = self.workers.get((command.source, command.source_epoch))
        tokens = len(live.request.prompt_tokens) + live.request.max_tokens
        blocks = -(-tokens // BLOCK_TOKENS)
        if worker.blocks_used + blocks > BLOCKS or self._random.random() < self.faults.no_room:
            refused = ev.ImportEnded(command.lease_id, 0, 0, "no_room", "no blocks")
            await self._post(worker, refused, certain=True)
            return
        worker.holdings[live.request_id] = blocks
        await self._pause(worker, 0.05)
        if live.request_id not in worker.holdings:
            return
        if source is None or not source.alive or live.request_id not in source.holdings:
            del worker.holdings[live.request_id]
            lost = ev.ImportEnded(command.lease_id, 0, 0, "source", "source was lost")
            await self._post(worker, lost, certain=True)
            return
        # The answer and the first tokens race.
        assert worker.group is not None
        arrived = ev.ImportEnded(command.lease_id, 1000, 10)
        worker.group.start_soon(self._post, worker, arrived)
        await self._decode(worker, live)

    async def _decode(self, worker: VirtualWorker, live: LiveRequest) -> None:
        for at in range(len(live.output), live.request.max_tokens):
            await self._pause(worker, STEP_S)
            if live.request_id not in worker.holdings:
                return
            last = at == live.request.max_tokens - 1
            if last:
                del worker.holdings[live.request_id]
            await self._token(worker, live, at, F.LENGTH if last else F.NONE)

    async def _free(self, worker: VirtualWorker, request_id: int) -> None:
        await self._pause(worker, 0.002)
        worker.holdings.pop(request_id, None)
        await self._occupancy(worker)
