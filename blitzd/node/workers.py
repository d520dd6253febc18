"""The node's real workers: processes on this machine, spoken to over unix sockets.

Each command becomes a task with a deadline; what comes of it goes back to the driver as
an input. Tasks of a worker end with it.
"""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog
from grpclib.client import Channel

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.node import worker_units
from blitzd.node.config import NodeConfig
from blitzd.node.health_watch import HealthWatch
from blitzd.node.live import LiveRequest
from blitzd.node.wire_ids import wire_id
from blitzd.node.worker_calls import (
    CALL_MARGIN_S,
    CallFailed,
    Reports,
    WorkerCalls,
    describe_failure,
)
from blitzd.node.worker_process import Cause, WorkerProcess
from blitzd.proto.blitzd.engine import v1 as pb

END_GRACE_S = 3.0
DYING_S = 0.2
"""Between the end of a dying worker's connections and that of its process."""

log = structlog.get_logger()


class Worker:
    """One epoch of one replica: its process, its channel, its tasks."""

    def __init__(
        self, replica: str, epoch: int, socket: Path, reports: Reports, config: NodeConfig
    ) -> None:
        self.replica = replica
        self.epoch = epoch
        self.socket = socket
        self.name = socket.stem
        self.process: WorkerProcess | None = None
        self.channel = Channel(path=str(socket))
        self.stub = pb.EngineStub(self.channel)
        self._start_s = config.start_deadline_s
        self.call_s = config.hang_deadline_s + CALL_MARGIN_S
        self.calls = WorkerCalls(replica, epoch, self.stub, reports, self.call_s)
        self.health = HealthWatch(
            self.calls.health,
            config.hang_deadline_s,
            config.step_deadline_s,
        )
        self.tasks: set[asyncio.Task[None]] = set()
        self.watched = asyncio.Event()
        """Its token stream is read. Requests wait for that: tokens nobody reads are gone."""
        self.told_to_end = False
        """Its streams break then, and that is no reason to kill it."""
        self.ending = False
        """Nobody wants to hear of its exit."""
        self.why = ""
        """Why we ended it, if it was us."""

    def start_request(self, work: Callable[[], Awaitable[None]]) -> None:
        async def when_watched() -> None:
            try:
                async with asyncio.timeout(self._start_s):
                    await self.watched.wait()
            except TimeoutError:
                self.give_up("its token stream did not begin")
            else:
                await work()

        self.start(when_watched())

    def start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a worker's task failed", replica=self.replica, exc_info=task.exception())

    def give_up(self, why: str) -> None:
        """Kills what does not answer; its exit then takes the usual way."""
        if self.told_to_end or self.process is None or not self.process.alive:
            return
        self.why = self.why or why
        self.process.signal(signal.SIGKILL)

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.channel.close()


class WorkerPool:
    """Carries out the core's commands on real workers (`ports.Workers`)."""

    def __init__(self, config: NodeConfig, runtime_dir: Path, reports: Reports) -> None:
        self._config = config
        self._runtime_dir = runtime_dir
        self._reports = reports
        self._workers: dict[tuple[str, int], Worker] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._performers: dict[type, Callable[..., None]] = {
            cmd.SpawnWorker: self._spawn,
            cmd.EndWorker: self._end,
            cmd.ResetWorker: self._reset,
            cmd.LoadModel: self._load,
            cmd.StartPrefill: self._prefill,
            cmd.DecodeLocally: self._decode_locally,
            cmd.HoldDecode: self._hold,
            cmd.ImportKv: self._import,
            cmd.ReleaseKv: self._release,
            cmd.CancelRequest: self._cancel,
            cmd.ShutDown: lambda command, live: None,
        }

    def perform(self, command: cmd.Command, live: LiveRequest | None) -> None:
        self._performers[type(command)](command, live)

    async def close(self) -> None:
        """Ends every worker. Returns when the processes are gone."""
        for worker in self._workers.values():
            worker.ending = True
        if self._starting:  # a unit that is being started has no process to end yet
            await asyncio.wait(self._starting, timeout=2 * worker_units.START_S)
        async with asyncio.TaskGroup() as ends:
            for worker in list(self._workers.values()):
                if worker.process is not None:
                    ends.create_task(worker.process.end(END_GRACE_S))
        for worker in self._workers.values():
            worker.close()

    # Life of a worker.

    def _socket(self, replica: str, epoch: int) -> Path:
        return self._runtime_dir / f"{replica}-{epoch}.sock"

    def _spawn(self, command: cmd.SpawnWorker, live: None) -> None:
        worker = self._enlist(command.replica, command.epoch)
        if self._config.spawn == "systemd":
            start = asyncio.ensure_future(self._start_unit(worker))
            self._starting.add(start)
            start.add_done_callback(self._starting.discard)
            return
        options = self._options(command.replica, command.epoch)
        argv = [sys.executable, "-m", "blitzd", "worker", *options]
        log_path = self._config.state_dir / "workers" / f"{worker.name}.log"
        try:
            worker.process = WorkerProcess.start(argv, log_path, self._exit_of(worker))
        except OSError as error:
            self._exit_of(worker)(f"could not be started: {error}")
            return
        worker.start(self._attach(worker))

    async def _start_unit(self, worker: Worker) -> None:
        exited = self._exit_of(worker)
        options = self._options(worker.replica, worker.epoch)
        try:
            pid = await worker_units.start(worker.name, options)
            worker.process = WorkerProcess(pid, exited, self._cause(worker))
        except (worker_units.UnitFailed, OSError, ValueError) as error:
            exited(f"could not be started: {error}")
            return
        if worker.ending or worker.told_to_end:
            await worker.process.end(END_GRACE_S)
        else:
            worker.start(self._attach(worker))

    def _cause(self, worker: Worker) -> Cause | None:
        """A unit is no child of ours; only the manager knows how it died."""
        by_systemd = self._config.spawn == "systemd"
        return partial(worker_units.cause, worker.name) if by_systemd else None

    def _options(self, replica: str, epoch: int) -> list[str]:
        config = self._config
        return [
            *("--id", replica, "--epoch", str(epoch)),
            *("--socket", str(self._socket(replica, epoch))),
            *("--device", config.device_of(replica)),
            *("--weights", config.weights),
            *("--threads", str(config.worker_threads)),
            *("--max-batch-tokens", str(config.max_batch_tokens)),
            *("--max-batch-size", str(config.max_batch_size)),
            *("--pace-layer-ms", str(config.pace_layer_ms)),
            *("--orphan-timeout", str(config.orphan_timeout_s)),
        ]

    def _enlist(self, replica: str, epoch: int) -> Worker:
        worker = Worker(replica, epoch, self._socket(replica, epoch), self._reports, self._config)
        self._workers[replica, epoch] = worker
        return worker

    def _exit_of(self, worker: Worker) -> Callable[[str], None]:
        def exited(how: str) -> None:
            self._workers.pop((worker.replica, worker.epoch), None)
            # A worker that was killed leaves its sockets: its own and that of its KV arena.
            for socket in self._runtime_dir.glob(f"{worker.name}.*sock"):
                socket.unlink(missing_ok=True)
            worker.close()
            if self._config.spawn == "systemd":
                self._background(worker_units.forget(worker.name))
            if not worker.ending:
                reason = f"{how} ({worker.why})" if worker.why else how
                tell = log.info if worker.told_to_end else log.warning
                tell("worker ended", replica=worker.replica, epoch=worker.epoch, how=reason)
                lost = ev.WorkerExited(worker.replica, worker.epoch, reason)
                self._background(self._reports.post(lost))

        return exited

    def _background(self, work: Awaitable[None]) -> None:
        """What outlives the worker that it is about."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attach(self, worker: Worker) -> None:
        assert worker.process is not None
        started = ev.WorkerStarted(worker.replica, worker.epoch, worker.process.pid)
        await self._reports.post(started)
        try:
            async with asyncio.timeout(self._config.start_deadline_s):
                while not worker.socket.exists():  # noqa: ASYNC110 - a file has no event
                    await asyncio.sleep(0.01)
                described = await worker.stub.describe(pb.DescribeRequest())
        except CallFailed as error:
            worker.give_up(f"did not come up: {describe_failure(error)}")
            return
        await self._attached(worker, described)

    async def _attached(self, worker: Worker, described: pb.DescribeReply) -> None:
        await self._reports.post(ev.WorkerDescribed(worker.replica, worker.epoch, described.pid))
        worker.start(self._watch(worker))
        worker.start(self._check_health(worker))

    async def _watch(self, worker: Worker) -> None:
        try:
            async for report in worker.stub.watch(pb.WatchRequest()):
                worker.watched.set()
                worker.health.heard()
                await self._reports.deliver(worker.replica, worker.epoch, report)
            why = "ended its token stream"
        except CallFailed as error:
            why = f"token stream broke: {describe_failure(error)}"
        # Without the stream its tokens are lost, so it cannot be used any more. When it is
        # dying, its exit says better what happened.
        await asyncio.sleep(DYING_S)
        worker.give_up(why)

    async def _check_health(self, worker: Worker) -> None:
        worker.give_up(await worker.health.failure())

    def _end(self, command: cmd.EndWorker, live: None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None:
            worker.told_to_end, worker.ending = True, not command.report
            if worker.process is not None:
                worker.start(worker.process.end(END_GRACE_S))

    # Adoption.

    async def adopt(self, replica: str, epoch: int, pid: int, digest: str) -> bool:
        """Takes over a worker of an earlier boot if it lives, is who the log says, was started
        as one would be now, and has the model that is wanted (empty: none). Ends it otherwise."""
        worker = self._enlist(replica, epoch)
        try:
            worker.process = WorkerProcess(pid, self._exit_of(worker), self._cause(worker))
        except ProcessLookupError:
            self._forget(worker)
            return False
        try:
            described = await worker.stub.describe(pb.DescribeRequest(), timeout=worker.call_s)
        except CallFailed:
            described = pb.DescribeReply()
        identity = (described.replica_id, described.epoch, described.pid)
        options, argv = self._options(replica, epoch), _argv(pid)
        as_now = argv[-len(options) :] == options
        if identity == (replica, epoch, pid) and described.model_digest == digest and as_now:
            return True
        worker.ending = True
        if _runs_as(argv, replica, epoch):
            await worker.process.end(END_GRACE_S)
        self._forget(worker)
        return False

    def _forget(self, worker: Worker) -> None:
        self._workers.pop((worker.replica, worker.epoch), None)
        worker.close()

    def _reset(self, command: cmd.ResetWorker, live: None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None:
            worker.start(self._reset_and_watch(worker, command.unload))

    async def _reset_and_watch(self, worker: Worker, unload: bool) -> None:
        try:
            call = pb.ResetRequest(unload_weights=unload)
            await worker.stub.reset(call, timeout=worker.call_s)
        except CallFailed as error:
            worker.give_up(f"could not be reset: {describe_failure(error)}")
            return
        if not worker.watched.is_set():
            worker.start(self._watch(worker))
            worker.start(self._check_health(worker))

    # Commands to a worker that runs. One that has died meanwhile is not missed here: its
    # exit is an input of its own.

    def _load(self, command: cmd.LoadModel, live: None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None:
            path = str(self._config.model_dir)
            peers = [
                pb.WeightPeer(replica_id=r, epoch=e, endpoint=str(self._socket(r, e)))
                for r, e in command.peers
            ]
            worker.start(worker.calls.load(path, self._config.kv_blocks, peers, command))

    def _prefill(self, command: cmd.StartPrefill, live: LiveRequest | None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None and live is not None:
            worker.start_request(lambda: worker.calls.prefill(command, live))

    def _decode_locally(self, command: cmd.DecodeLocally, live: LiveRequest | None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None and live is not None:
            worker.start_request(lambda: worker.calls.decode_locally(command, live))

    def _hold(self, command: cmd.HoldDecode, live: LiveRequest | None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None:
            wire = wire_id(command.request_id, command.attempt)
            call = pb.HoldRequestsRequest(request_ids=[wire])
            # Not here any more: its end is on its way.
            held = worker.stub.hold_requests(call, timeout=worker.call_s)
            worker.start(self._insist(worker, held))

    def _import(self, command: cmd.ImportKv, live: LiveRequest | None) -> None:
        worker = self._workers.get((command.target, command.target_epoch))
        if worker is not None and live is not None:
            source = str(self._socket(command.source, command.source_epoch))
            ucx = self._config.same_node == "ucx"
            transport = pb.Transport.UCX if ucx else pb.Transport.MAP
            worker.start_request(lambda: worker.calls.import_kv(command, live, source, transport))

    def _release(self, command: cmd.ReleaseKv, live: LiveRequest | None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None:
            call = pb.ReleaseKvRequest(request_ids=[wire_id(command.request_id, command.attempt)])
            worker.start(self._insist(worker, worker.stub.release_kv(call, timeout=worker.call_s)))

    def _cancel(self, command: cmd.CancelRequest, live: LiveRequest | None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None:
            call = pb.CancelRequest(request_ids=[wire_id(command.request_id, command.attempt)])
            worker.start(self._insist(worker, worker.stub.cancel(call, timeout=worker.call_s)))

    async def _insist(self, worker: Worker, call: Awaitable[object]) -> None:
        """For calls that must take effect, or blocks leak: a worker that does not take them
        is not usable any more."""
        try:
            await call
        except CallFailed as error:
            worker.give_up(f"did not free a request: {describe_failure(error)}")


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (OSError, UnicodeDecodeError):
        return []


def _runs_as(argv: list[str], replica: str, epoch: int) -> bool:
    """Whether a process is that worker and not a stranger that got its number."""
    return "worker" in argv and all(
        argv[argv.index(name) + 1] == value if name in argv[:-1] else False
        for name, value in (("--id", replica), ("--epoch", str(epoch)))
    )
