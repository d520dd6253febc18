"""Workers of other nodes: how the pool comes to them, by way of the hub and their agents.

Those of this boot are spawned. Those of the last one are expected, and taken up again when
their agent is back and still has them.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping

from blitzd.control.commands import SpawnWorker
from blitzd.events import types as ev
from blitzd.fabric import channel_to
from blitzd.node.config import NodeConfig
from blitzd.node.hub import Hub, Key
from blitzd.node.remote_process import RemoteProcess
from blitzd.node.worker import Home, Worker
from blitzd.node.worker_calls import CallFailed, Reports, describe_failure
from blitzd.proto.blitzd.engine import v1 as engine
from blitzd.proto.blitzd.node import v1 as pb


class WorkersAfar:
    """The pool's side of the hub (`hub.Host`)."""

    def __init__(
        self,
        config: NodeConfig,
        hub: Hub,
        reports: Reports,
        workers: dict[Key, Worker],
        exit_of: Callable[[Worker], Callable[[str], None]],
        attach: Callable[[Worker], Awaitable[None]],
    ) -> None:
        """`workers` are the pool's, of all nodes. `exit_of` gives what is to be told of a
        worker's end; `attach` talks to one that has started."""
        self._config = config
        self._hub = hub
        self._reports = reports
        self._workers = workers
        self._exit_of = exit_of
        self._attach = attach
        self._expected: dict[str, set[Key]] = {}
        """By node."""
        hub.serve(self)

    def spawn(self, command: SpawnWorker) -> None:
        _, process = self._enlist(command.node, command.replica, command.epoch)
        process.start()

    def _enlist(self, node: str, replica: str, epoch: int) -> tuple[Worker, RemoteProcess]:
        home = self._hub.home(node) or Home(node, "", 0)
        worker = Worker(replica, epoch, home, self._reports, self._config)
        self._workers[replica, epoch] = worker
        process = self._hub.process(node, replica, epoch, self._exit_of(worker))
        worker.process = process
        return worker, process

    def started(self, node: str, replica: str, epoch: int, pid: int, endpoint: str) -> None:
        worker = self._workers.get((replica, epoch))
        if worker is None or worker.home.node != node or worker.connected:
            return
        self._connect(worker, pid, endpoint)
        if not worker.told_to_end:
            worker.start(self._attach(worker))

    def _connect(self, worker: Worker, pid: int, endpoint: str) -> None:
        assert isinstance(worker.process, RemoteProcess)
        worker.process.pid = pid
        worker.connect(channel_to(endpoint, self._config.tls))

    def exited(self, node: str, replica: str, epoch: int, reason: str) -> None:
        worker = self._workers.get((replica, epoch))
        if worker is not None and worker.home.node == node:
            assert isinstance(worker.process, RemoteProcess)
            worker.process.ended(reason)

    def rejoined(self, node: str, live: Mapping[Key, pb.Worker]) -> list[Key]:
        kept = []
        for key, worker in list(self._workers.items()):
            if worker.home.node != node:
                continue
            if key in live and worker.connected and not (worker.why or worker.told_to_end):
                kept.append(key)
            else:
                self.exited(node, *key, "not usable when its node was back in contact")
        return kept + self._take_up(node, live)

    # Adoption.

    def expect(self, node: str, workers: Iterable[Key]) -> None:
        """Those of the last boot that are to be taken up when their node is back."""
        self._expected[node] = set(workers)

    def gave_up(self, node: str) -> None:
        self._expected.pop(node, None)

    def _take_up(self, node: str, live: Mapping[Key, pb.Worker]) -> list[Key]:
        found = []
        for key in self._expected.pop(node, ()):
            worker, process = self._enlist(node, *key)
            if key in live:
                self._connect(worker, live[key].pid, live[key].endpoint)
                worker.start(self._find(worker, process))
                found.append(key)
            else:
                process.ended("not there any more when the controller was back")
        return found

    async def _find(self, worker: Worker, process: RemoteProcess) -> None:
        """Ends it if it does not answer as who the log says, or has another model."""
        try:
            now = await worker.stub.describe(engine.DescribeRequest(), timeout=worker.call_s)
        except CallFailed as error:
            worker.give_up(f"did not answer when it was found: {describe_failure(error)}")
            return
        if (now.replica_id, now.epoch) != (worker.replica, worker.epoch):
            worker.give_up(f"{now.replica_id}/{now.epoch} answers in its place")
            return
        if now.model_digest not in ("", self._hub.digest):
            worker.give_up(f"has model {now.model_digest}, not {self._hub.digest}")
            return
        worker.endpoint = now.endpoint
        await self._reports.post(
            ev.WorkerFound(
                worker.replica,
                worker.epoch,
                process.pid,
                now.model_digest,
                now.layers_total,
                now.bytes_total,
                now.block_tokens,
                now.blocks_total,
            )
        )
