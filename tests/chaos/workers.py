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
from blitzd.node.wire_ids import request_and_attempt, wire_id
from blitzd.proto.blitzd.engine import v1 as pb
from tests.chaos.jobs import Job, token_at
from tests.chaos.live import LAYERS, Live, LiveWork, has_half
from tests.chaos.scenario import Faults

BLOCK_TOKENS = 64
BLOCKS = 24
STEP_S = 0.01
HEALTH_S = 1.0
HANG_DEADLINE_S = 10.0
F = pb.FinishReason


@dataclass(eq=False)
class VirtualWorker:
    replica: str
    epoch: int
    group: TaskGroup | None = None
    alive: bool = True
    hung: bool = False
    slowness: float = 1.0
    holdings: dict[int, int] = field(default_factory=dict)
    """Id of an attempt -> KV blocks: all that a worker could leak."""
    made: dict[int, int] = field(default_factory=dict)
    """Id of an attempt -> output tokens that it has been given or has made: what its KV is of."""
    to_hold: set[int] = field(default_factory=set)
    """Those that are to stop decoding after their next token."""
    halves: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Id of an attempt -> layers [first, last) whose KV is here, of those that two share."""
    loads: int = 0
    """That were begun: each takes the place of the one before."""
    dry: bool = False
    """It loads, and has no peers left."""
    importing: dict[int, int] = field(default_factory=dict)
    """Id of an attempt -> the lease that its KV came by last."""
    live: Live | None = None
    computing: int = 0
    """Prompts that are being computed in one go."""

    def hold(self, job: "Job") -> None:
        self.holdings[job.id] = -(-(job.prompt + job.sent + 1) // BLOCK_TOKENS)

    def forget(self) -> None:
        """Every request."""
        self.holdings.clear()
        self.halves.clear()
        self.live = None

    def imports(self, attempt: int, lease_id: int) -> bool:
        """Whether that transfer goes on: it was not freed, and none has come after it."""
        return attempt in self.holdings and self.importing[attempt] == lease_id

    @property
    def blocks_used(self) -> int:
        return sum(self.holdings.values())


class VirtualWorkers:
    """`ports.Workers` in virtual time."""

    def __init__(self, driver: Driver, tasks: TaskGroup, random: Random, faults: Faults) -> None:
        self.faults = faults
        self.workers: dict[tuple[str, int], VirtualWorker] = {}
        self.live = LiveWork(self)
        self._driver = driver
        self._tasks = tasks
        self.random = random

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
                self._with(command, VirtualWorker.forget)
            case cmd.DecodeLocally():
                if live is not None and live.runs(command.attempt):
                    self._run(command, self._go_on, Job(live))
            case cmd.LoadModel():
                self._run(command, self._load, command)
            case cmd.FollowLive():
                old = cmd.ReleaseKv(command.old, command.old_epoch, 0)
                self._run(old, self.live.follow, command)
            case cmd.HoldWeights():
                self._run(command, self._hold_weights)
            case cmd.StartPrefill():
                if live is not None and live.runs(command.attempt):
                    self._run(command, self._prefill, Job(live), command.hold)
            case cmd.ImportKv():
                if live is not None and live.runs(command.attempt):
                    target = cmd.LoadModel(command.target, command.target_epoch)
                    self._run(target, self._import, command, Job(live))
            case cmd.HoldDecode():
                wire = wire_id(command.request_id, command.attempt)
                self._with(command, lambda worker: worker.to_hold.add(wire))
            case cmd.ReleaseKv() | cmd.CancelRequest():
                self._run(command, self._free, wire_id(command.request_id, command.attempt))
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
            await self.post(worker, ev.WorkerStarted(worker.replica, worker.epoch, 1))
            await self.pause(worker, 0.5)
            await self.post(worker, ev.WorkerDescribed(worker.replica, worker.epoch, 1), True)
            while True:
                await self.pause(worker, HEALTH_S)
                await self._tell_holdings(worker)

    async def _tell_holdings(self, worker: VirtualWorker) -> None:
        held = tuple(request_and_attempt(wire) for wire in worker.holdings)
        on = (worker.replica, worker.epoch)
        await self.post(worker, ev.HoldingsReported(*on, worker.blocks_used, held, (), 0, 0, ()))

    def _end(self, worker: VirtualWorker) -> None:
        worker.alive = False
        worker.forget()
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
        await anyio.sleep(self.random.uniform(0.001, 0.1))
        await self._driver.post(ev.WorkerExited(worker.replica, worker.epoch, reason))

    def hang(self, worker: VirtualWorker) -> None:
        """It stops answering; the watchdog ends it, unless it goes on just in time."""
        worker.hung = True
        wakes = self.random.random() < 0.5
        self._tasks.start_soon(self._wake if wakes else self._end_hung, worker)

    async def _wake(self, worker: VirtualWorker) -> None:
        await anyio.sleep(self.random.uniform(0.1, 0.9) * HANG_DEADLINE_S)
        worker.hung = False

    async def _end_hung(self, worker: VirtualWorker) -> None:
        await anyio.sleep(HANG_DEADLINE_S)
        self.kill(worker, f"silent for {HANG_DEADLINE_S:.0f} s")

    async def pause(self, worker: VirtualWorker, mean_s: float) -> None:
        await anyio.sleep(worker.slowness * self.random.uniform(0.5, 1.5) * mean_s)
        while worker.hung:
            await anyio.sleep(0.1)

    # Answers. A gRPC stream or call is reliable while its worker lives; what may be lost,
    # late or double is the answer of a call (`certain=False`).

    async def post(self, worker: VirtualWorker, payload: Payload, certain: bool = False) -> None:
        if not certain and self.random.random() < self.faults.drop:
            return
        if not certain and self.random.random() < self.faults.delay:
            await self.pause(worker, 0.3)
        await self._driver.post(payload)
        if self.random.random() < self.faults.duplicate:
            await self._driver.post(payload)

    async def token(
        self, worker: VirtualWorker, job: Job, at: int, finish: F, relayed: int | None = None
    ) -> None:
        report = pb.StepReport(
            relayed_ids=[] if relayed is None else [job.id],
            relayed_layers=[] if relayed is None else [relayed],
            request_ids=[job.id],
            token_ids=[token_at(job.seed, at)],
            texts=[f" {at}"],
            finish=[finish],
            blocks_total=BLOCKS,
        )
        await self.deliver(worker, report)

    async def deliver(self, worker: VirtualWorker, report: pb.StepReport) -> None:
        report.running, report.blocks_used = len(worker.holdings), worker.blocks_used
        await self._driver.deliver(worker.replica, worker.epoch, report)

    async def _occupancy(self, worker: VirtualWorker) -> None:
        await self.deliver(worker, pb.StepReport())

    # Commands.

    async def _load(self, worker: VirtualWorker, command: cmd.LoadModel) -> None:
        peers, live = command.peers, command.live
        on = (worker.replica, worker.epoch)
        asked, source, reason = list(peers), "map", ""
        blocks = (BLOCK_TOKENS, BLOCKS) if live else (0, 0)
        layer_s = self.random.choice([0.1, 0.5, 1.0]) if live else 0.1
        worker.loads = mine = worker.loads + 1
        for layers in range(LAYERS):
            await self.pause(worker, layer_s)
            if worker.loads != mine:
                return
            # A dead source is noticed, and the next one goes on.
            while asked and not self._gives(*asked[0]):
                asked.pop(0)
            if peers and not asked:
                # Another of the domain, which brings a shard, may bring all of them.
                worker.dry = True
                if not any(self._gives(*a) and not self.workers[a].dry for a in command.shards):
                    reason = "no peer has the weights any more"
                    break
            source = asked[0][0] if asked else "map"
            moved = ev.LoadMoved(*on, layers, LAYERS, layers * 10, LAYERS * 10, source, *blocks)
            if live and worker.live is None:
                self.live.open(worker)
            if worker.live is not None:
                worker.live.ready = layers
            await self.post(worker, moved)
        if not reason and self.random.random() < self.faults.load_failure:
            reason = "digest differs"
        if reason:
            worker.forget()
        elif worker.live is not None:
            worker.live.ready = LAYERS
        ended = ev.LoadEnded(*on, "d", source, LAYERS, LAYERS * 10, BLOCK_TOKENS, BLOCKS, reason)
        await self.post(worker, ended, certain=True)

    async def _hold_weights(self, worker: VirtualWorker) -> None:
        await self.pause(worker, 0.2)
        failed = self.random.random() < self.faults.load_failure
        reason = "digest differs" if failed else ""
        ended = ev.PoolCopyEnded(worker.replica, worker.epoch, LAYERS * 10, reason)
        await self.post(worker, ended, certain=True)

    def _gives(self, replica: str, epoch: int) -> bool:
        source = self.workers.get((replica, epoch))
        return source is not None and source.alive and not source.hung

    async def _prefill(self, worker: VirtualWorker, job: Job, hold: bool) -> None:
        if await self.live.prefill(worker, job, hold):
            return
        worker.hold(job)
        worker.computing += 1
        try:
            await self.pause(worker, 0.0005 * (job.prompt + job.sent))
        finally:
            worker.computing -= 1
        if job.id not in worker.holdings:
            return
        if self.random.random() < self.faults.step_failure:
            await self.fail_step(worker, job)
            return
        if self.random.random() < self.faults.refusal:
            del worker.holdings[job.id]
            await self._errors(worker, [job.id], "no such token", alone=True)
            return
        worker.made[job.id] = job.sent + 1
        if job.sent + 1 == job.max_tokens:
            del worker.holdings[job.id]
            await self.token(worker, job, job.sent, F.LENGTH)
        elif hold:
            await self.token(worker, job, job.sent, F.HELD)
        else:
            await self.token(worker, job, job.sent, F.NONE)
            await self._decode(worker, job, job.sent + 1)

    async def fail_step(self, worker: VirtualWorker, job: Job) -> None:
        """Whoever happens to be in the step of `job` is lost with it."""
        lost = [held for held in worker.holdings if held == job.id or self.random.random() < 0.5]
        for attempt in lost:
            del worker.holdings[attempt]
        await self._errors(worker, lost, "NaN in logits", alone=False)

    async def _errors(
        self, worker: VirtualWorker, attempts: list[int], reason: str, *, alone: bool
    ) -> None:
        report = pb.StepReport(
            failed_ids=attempts,
            errors=[reason] * len(attempts),
            failed_alone=[alone] * len(attempts),
            running=len(worker.holdings),
            blocks_used=worker.blocks_used,
        )
        await self._driver.deliver(worker.replica, worker.epoch, report)

    async def _import(self, worker: VirtualWorker, command: cmd.ImportKv, job: Job) -> None:
        source = self.workers.get((command.source, command.source_epoch))
        blocks = -(-(job.prompt + job.max_tokens) // BLOCK_TOKENS)
        if worker.blocks_used + blocks > BLOCKS or self.random.random() < self.faults.no_room:
            refused = ev.ImportEnded(command.lease_id, 0, 0, "no_room", "no blocks")
            await self.post(worker, refused, certain=True)
            return
        worker.holdings[job.id] = blocks
        worker.importing[job.id] = command.lease_id
        for beat in range(self.random.choice([1, 1, 1, 4])):
            await self.pause(worker, 0.05 if beat == 0 else 0.4)
            if not worker.imports(job.id, command.lease_id):
                return
            if beat:
                await self.post(worker, ev.ImportProgressed(command.lease_id, beat * 100))
        if not worker.imports(job.id, command.lease_id):
            return
        fault = ""
        if source is None or not source.alive or source.holdings.get(job.id) is None:
            fault = "not_held"
        elif source.made[job.id] != job.sent:
            fault = "mismatch"
        elif not self._has_it(command, job):
            fault = "not_held"
        elif self.random.random() < self.faults.stalled_import:
            # Neither bytes nor words: the lease ends it, or whoever frees the request.
            return
        elif self.random.random() < self.faults.bad_import:
            fault = self.random.choice(["target", "source", "corrupt", "mismatch", "refused"])
        if fault:
            del worker.holdings[job.id]
            await self._occupancy(worker)
            sums = ("00", "01") if fault == "corrupt" else ("", "")
            lost = ev.ImportEnded(command.lease_id, 0, 0, fault, "the peer was lost", 2, *sums)
            await self.post(worker, lost, certain=True)
            return
        # The answer and the first tokens race.
        assert worker.group is not None
        arrived = ev.ImportEnded(command.lease_id, 1000, 10)
        worker.group.start_soon(self.post, worker, arrived)
        worker.made[job.id] = job.sent
        await self._decode(worker, job, job.sent)

    def _has_it(self, command: cmd.ImportKv, job: Job) -> bool:
        """All layers on one, or each of two their own."""
        split = command.split_layer or LAYERS
        source = self.workers.get((command.source, command.source_epoch))
        rest = self.workers.get((command.rest, command.rest_epoch))
        whole = split == LAYERS or has_half(rest, job.id, split, LAYERS)
        return whole and has_half(source, job.id, 0, split)

    async def _go_on(self, worker: VirtualWorker, job: Job) -> None:
        """From where its KV ends, whatever its client has got elsewhere meanwhile."""
        await self._decode(worker, job, worker.made.get(job.id, job.sent))

    async def _decode(self, worker: VirtualWorker, job: Job, begin: int) -> None:
        for at in range(begin, job.max_tokens):
            await self.pause(worker, STEP_S)
            if job.id not in worker.holdings:
                return
            worker.made[job.id] = at + 1
            last = at == job.max_tokens - 1
            if last:
                del worker.holdings[job.id]
            elif job.id in worker.to_hold:
                worker.to_hold.discard(job.id)
                await self.token(worker, job, at, F.HELD)
                return
            await self.token(worker, job, at, F.LENGTH if last else F.NONE)

    async def _free(self, worker: VirtualWorker, attempt: int) -> None:
        await self.pause(worker, 0.002)
        if self.random.random() >= self.faults.leak:
            worker.holdings.pop(attempt, None)
            worker.halves.pop(attempt, None)
        await self._occupancy(worker)
