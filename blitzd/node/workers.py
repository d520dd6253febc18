"""The real workers: processes on this machine or, by way of their agents (`workers_afar`), on
others. Each is spoken to directly, over a unix socket here and over TCP there.

Each command becomes a task with a deadline; what comes of it goes back to the driver as
an input. Tasks of a worker end with it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.fabric import channel_to
from blitzd.node import worker_units
from blitzd.node.config import NodeConfig
from blitzd.node.hub import Hub, Key
from blitzd.node.live import LiveRequest
from blitzd.node.starter import NotStarted, Starter
from blitzd.node.wire_ids import wire_id
from blitzd.node.worker import Home, Worker
from blitzd.node.worker_calls import CallFailed, KvRoute, Reports, describe_failure
from blitzd.node.workers_afar import WorkersAfar
from blitzd.proto.blitzd.engine import v1 as pb

END_GRACE_S = 3.0
DYING_S = 0.2
"""Between the end of a dying worker's connections and that of its process."""

log = structlog.get_logger()


class WorkerPool:
    """Carries out the core's commands on real workers (`ports.Workers`)."""

    def __init__(
        self, config: NodeConfig, runtime_dir: Path, reports: Reports, hub: Hub | None = None
    ) -> None:
        """`hub` knows the other nodes; None: there are none."""
        self._config = config
        self._home = Home("", str(config.model_dir), config.kv_blocks)
        self._starter = Starter(config, runtime_dir)
        self._reports = reports
        self._workers: dict[Key, Worker] = {}
        self.afar: WorkersAfar | None = None
        if hub is not None:
            shared = (self._workers, self._exit_of, self._attach)
            self.afar = WorkersAfar(config, hub, reports, *shared)
        self._starting: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._performers: dict[type, Callable[..., None]] = {
            cmd.SpawnWorker: self._spawn,
            cmd.EndWorker: self._end,
            cmd.ResetWorker: self._reset,
            cmd.LoadModel: self._load,
            cmd.HoldWeights: self._hold_weights,
            cmd.StartPrefill: self._prefill,
            cmd.DecodeLocally: self._decode_locally,
            cmd.HoldDecode: self._hold,
            cmd.FollowLive: self._follow,
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

    def _spawn(self, command: cmd.SpawnWorker, live: None) -> None:
        if command.node:
            assert self.afar is not None
            self.afar.spawn(command)
            return
        worker = self._enlist(command.replica, command.epoch)
        start = asyncio.ensure_future(self._start(worker))
        self._starting.add(start)
        start.add_done_callback(self._starting.discard)

    async def _start(self, worker: Worker) -> None:
        exited = self._exit_of(worker)
        try:
            worker.process = await self._starter.start(worker.replica, worker.epoch, exited)
        except NotStarted as error:
            exited(f"could not be started: {error}")
            return
        if worker.ending or worker.told_to_end:
            await worker.process.end(END_GRACE_S)
        else:
            worker.start(self._attach(worker))

    def _enlist(self, replica: str, epoch: int) -> Worker:
        worker = Worker(replica, epoch, self._home, self._reports, self._config)
        worker.connect(channel_to(self._socket(replica, epoch), self._config.tls))
        self._workers[replica, epoch] = worker
        return worker

    def _socket(self, replica: str, epoch: int) -> str:
        return str(self._starter.socket(replica, epoch))

    def _exit_of(self, worker: Worker) -> Callable[[str], None]:
        def exited(how: str) -> None:
            self._workers.pop((worker.replica, worker.epoch), None)
            worker.close()
            if not worker.home.node:
                self._starter.clear(worker.replica, worker.epoch)
                self._background(self._starter.forget(worker.replica, worker.epoch))
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
        socket = self._starter.socket(worker.replica, worker.epoch)
        try:
            async with asyncio.timeout(self._config.start_deadline_s):
                while not (worker.home.node or socket.exists()):  # noqa: ASYNC110 - a file has no event
                    await asyncio.sleep(0.01)
                described = await worker.stub.describe(pb.DescribeRequest())
        except CallFailed as error:
            worker.give_up(f"did not come up: {describe_failure(error)}")
            return
        if (described.replica_id, described.epoch) != (worker.replica, worker.epoch):
            worker.give_up(f"{described.replica_id}/{described.epoch} answers in its place")
            return
        worker.endpoint = described.endpoint
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
                self._background(worker.process.end(END_GRACE_S))

    # Adoption.

    async def adopt(self, replica: str, epoch: int, pid: int, digest: str) -> bool:
        """Takes over a worker of an earlier boot if it lives, is who the log says, was started
        as one would be now, and has the model that is wanted (empty: none). Ends it otherwise."""
        worker = self._enlist(replica, epoch)
        worker.process = self._starter.adopt(replica, epoch, pid, self._exit_of(worker))
        if worker.process is None:
            self._forget(worker)
            return False
        try:
            described = await worker.stub.describe(pb.DescribeRequest(), timeout=worker.call_s)
        except CallFailed:
            described = pb.DescribeReply()
        identity = (described.replica_id, described.epoch, described.pid)
        as_now = self._starter.started_as_now(replica, epoch, pid)
        if identity == (replica, epoch, pid) and described.model_digest == digest and as_now:
            worker.endpoint = described.endpoint
            return True
        worker.ending = True
        if self._starter.is_worker(replica, epoch, pid):
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
            peers = [
                pb.WeightPeer(replica_id=r, epoch=e, endpoint=self._endpoint(r, e, worker))
                for r, e in command.peers
            ]
            shards = [
                pb.WeightPeer(
                    replica_id=r,
                    epoch=e,
                    endpoint=self._endpoint(r, e, worker),
                    transport=self._transport(worker, (r, e)),
                )
                for r, e in command.shards
            ]
            home = worker.home
            load = worker.calls.load(home.model_path, home.kv_blocks, peers, shards, command)
            worker.start(load)

    def _hold_weights(self, command: cmd.HoldWeights, live: None) -> None:
        worker = self._workers.get((command.replica, command.epoch))
        if worker is not None:
            worker.start(worker.calls.hold_weights(worker.home.model_path))

    def _endpoint(self, replica: str, epoch: int, caller: Worker) -> str:
        """Where `caller` reaches that worker; one that is gone it will not find."""
        there = self._workers.get((replica, epoch))
        if there is None or not (there.home.node or caller.home.node):
            return self._socket(replica, epoch)
        return there.endpoint

    def _transport(self, target: Worker, *sources: tuple[str, int]) -> pb.Transport:
        known = [w for w in map(self._workers.get, sources) if w is not None]
        here = all(worker.home.node == target.home.node for worker in known)
        maps = here and self._config.same_node == "map"
        return pb.Transport.MAP if maps else pb.Transport.UCX

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
            source = (command.source, command.source_epoch)
            rest = (command.rest, command.rest_epoch)
            route = KvRoute(
                self._transport(worker, source, rest),
                self._endpoint(*source, worker),
                self._endpoint(*rest, worker) if command.rest else "",
            )
            worker.start_request(lambda: worker.calls.import_kv(command, live, route))

    def _follow(self, command: cmd.FollowLive, live: None) -> None:
        worker = self._workers.get((command.old, command.old_epoch))
        if worker is not None:
            new = (command.new, command.new_epoch)
            call = pb.FollowLiveRequest(
                source_replica=command.new,
                source_epoch=command.new_epoch,
                source_endpoint=self._endpoint(*new, worker),
                transport=self._transport(worker, new),
            )
            worker.start(worker.calls.follow_live(command.pair_id, call))

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
