"""Real worker processes, and a client that talks to them as the daemon does."""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from grpclib.client import Channel

from blitzd.engine.token_logprobs import entries
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import Output

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 20.0


class Process:
    """A worker's process, by pidfd: it may be a grandchild."""

    def __init__(self, pid: int, socket: Path) -> None:
        self.pid = pid
        self.socket = socket
        self._pidfd = os.pidfd_open(pid)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    @property
    def alive(self) -> bool:
        return not select.select([self._pidfd], [], [], 0)[0]

    @property
    def shared_kib(self) -> int:
        """Shared memory that it has touched, its own and others'."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("RssShmem:")[1].split()[0])

    async def wait(self, timeout_s: float = ANSWER_S) -> None:
        async with asyncio.timeout(timeout_s):
            while self.alive:  # noqa: ASYNC110 - a pidfd has no future
                await asyncio.sleep(0.002)

    def close(self) -> None:
        self.kill()
        select.select([self._pidfd], [], [], ANSWER_S)
        os.close(self._pidfd)


class Zygote:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.epochs: dict[str, int] = {}
        self.started: list[Process] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, name: str, **options: Any) -> Process:
        """The next epoch of replica `name`."""
        epoch = self.epochs[name] = self.epochs.get(name, 0) + 1
        socket = self.directory / f"{name}-{epoch}.sock"
        order = {
            "identity": f"{name}/{epoch}",
            "socket": str(socket),
            "log": str(self.directory / f"{name}.log"),
            **options,
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], 60.0)[0], "the zygote is stuck"
        process = Process(int(self._process.stdout.readline()), socket)
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.close()
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(ANSWER_S)


@contextlib.contextmanager
def zygote(directory: Path) -> Iterator[Zygote]:
    one = Zygote(directory)
    try:
        yield one
    finally:
        one.close()


class ImportFailed(Exception):
    """An import ended with a fault."""

    def __init__(self, report: pb.ImportKvReport) -> None:
        super().__init__(f"{report.fault.name}: {report.reason}")
        self.report = report
        self.fault = report.fault
        self.message = report.reason


async def imported(stub: pb.EngineStub, call: pb.ImportKvRequest, timeout: float = ANSWER_S) -> Any:
    """The last report. Raises ImportFailed."""
    reports = [report async for report in stub.import_kv(call, timeout=timeout)]
    *beats, last = reports
    assert last.ended and not any(beat.ended for beat in beats)
    if last.fault:
        raise ImportFailed(last)
    return last


class Client:
    """One epoch of one worker, watched."""

    def __init__(self, replica: str, epoch: int, process: Process) -> None:
        self.replica = replica
        self.epoch = epoch
        self.process = process
        self.outputs: dict[int, Output] = {}
        self.relayed: dict[int, int] = {}
        """Layers of requests that ran on New, of those that this gave away or took."""
        self.last = pb.StepReport()
        self.channel = Channel(path=str(process.socket))
        self.stub = pb.EngineStub(self.channel)
        self._moved = asyncio.Condition()
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, replica: str, epoch: int, process: Process) -> "Client":
        async with asyncio.timeout(ANSWER_S):
            while True:
                client = cls(replica, epoch, process)
                with contextlib.suppress(OSError):
                    await client.stub.describe(pb.DescribeRequest())
                    return client
                client.channel.close()
                assert process.alive, f"{replica}/{epoch} ended before it served"
                await asyncio.sleep(0.002)

    async def load_model(self, model: Path, blocks: int) -> list[pb.LoadProgress]:
        call = pb.LoadModelRequest(model_path=str(model), blocks_total=blocks)
        async with asyncio.timeout(ANSWER_S):
            return [progress async for progress in self.stub.load_model(call)]

    async def watch(self) -> None:
        stream = self.stub.watch(pb.WatchRequest())
        async with asyncio.timeout(ANSWER_S):
            self.last = await anext(stream)
        self._watching = asyncio.create_task(self._watch(stream))
        # Its end is looked at where it matters.
        self._watching.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _watch(self, stream: AsyncIterator[pb.StepReport]) -> None:
        async for report in stream:
            async with self._moved:
                self.take(report)
                self._moved.notify_all()

    def take(self, report: pb.StepReport) -> None:
        self.last = report
        columns = (
            report.request_ids,
            report.token_ids,
            report.texts,
            report.finish,
            report.cached_tokens,
        )
        for number, token, text, finish, cached in zip(*columns, strict=True):
            output = self.outputs.setdefault(number, Output())
            output.cached += cached
            output.tokens.append(token)
            output.text += text
            output.finish = finish
        for number, position, found in entries(report):
            self.outputs[number].logprobs[position] = found
        self.relayed |= dict(zip(report.relayed_ids, report.relayed_layers, strict=True))
        for number, error in zip(report.failed_ids, report.errors, strict=True):
            output = self.outputs.setdefault(number, Output())
            output.finish, output.error = pb.FinishReason.ERROR, error

    async def until(self, number: int, timeout: float = ANSWER_S) -> Output:
        async with asyncio.timeout(timeout), self._moved:
            await self._moved.wait_for(
                lambda: number in self.outputs and self.outputs[number].ended
            )
        return self.outputs[number]

    async def until_blocks_used(self, blocks: int) -> None:
        async with asyncio.timeout(ANSWER_S), self._moved:
            await self._moved.wait_for(lambda: self.last.blocks_used == blocks)

    async def prefill(self, request: pb.Request, hold: bool = False) -> None:
        call = pb.PrefillRequest(request=request, hold=hold)
        await self.stub.prefill(call, timeout=ANSWER_S)

    def import_from(
        self,
        source: "Client",
        request: pb.Request,
        transport: pb.Transport,
        *,
        lease_id: int = 1,
        timeout: float = ANSWER_S,
        stall_ms: int = 0,
    ) -> Any:
        """A coroutine of the last report. Raises ImportFailed."""
        call = pb.ImportKvRequest(
            request=request,
            lease_id=lease_id,
            source_replica=source.replica,
            source_epoch=source.epoch,
            source_endpoint=str(source.process.socket),
            transport=transport,
            stall_ms=stall_ms,
        )
        return imported(self.stub, call, timeout)

    async def holdings(self) -> pb.Holdings:
        reply = await self.stub.health(pb.HealthRequest(), timeout=ANSWER_S)
        assert reply.holdings is not None
        return reply.holdings

    async def holdings_or_none(self) -> pb.Holdings | None:
        """None while no model is loaded."""
        return (await self.stub.health(pb.HealthRequest(), timeout=ANSWER_S)).holdings

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self.channel.close()


async def up(zygote: Zygote, name: str, model: Path, blocks: int = 64, **options: Any) -> Client:
    """The next epoch of replica `name`: started, loaded, watched."""
    process = zygote.start(name, **options)
    client = await Client.connect(name, zygote.epochs[name], process)
    await client.load_model(model, blocks)
    await client.watch()
    return client
