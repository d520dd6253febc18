"""The worker process through its RPCs."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from blitzd.engine.options import ReplicaOptions
from blitzd.engine.replica import Replica, open_replica
from blitzd.engine.service import EngineService
from blitzd.fabric import Identity
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import request
from tests.engine.workers import ROOT, Client, Process, Zygote, up
from tests.tiny import make_tiny


def run(test: Coroutine[Any, Any, None], timeout_s: float = 60.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(timeout_s):
            await test

    uvloop.run(bounded())


async def refused(call: Awaitable[object]) -> GRPCError:
    with pytest.raises(GRPCError) as caught:
        await call
    assert caught.value.message
    return caught.value


def spawn(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "blitzd", "worker", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_serves_generates_and_ends_cleanly(model: Path, tmp_path: Path) -> None:
    socket = tmp_path / "r0-7.sock"
    child = spawn(tmp_path, "--id", "r0", "--epoch", "7", "--socket", str(socket))

    async def talk() -> None:
        client = await Client.connect("r0", 7, Process(child.pid, socket))
        told = await client.stub.describe(pb.DescribeRequest(), timeout=20)
        assert (told.replica_id, told.epoch, told.pid) == ("r0", 7, child.pid)
        assert (told.model_digest, told.layers_total) == ("", 0)
        assert os.getsid(child.pid) == child.pid
        await client.load_model(model, 16)
        await client.watch()
        await client.prefill(request(1, "hello", 5))
        assert len((await client.until(1)).tokens) == 5
        await client.close()

    try:
        run(talk())
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0
    finally:
        child.kill()
    assert list(tmp_path.iterdir()) == [], "sockets are left behind"
    assert child.stderr is not None
    assert '"event": "worker ends"' in child.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--id", "r/0", "--epoch", "1", "--socket", "s"], "'r/0/1' is not REPLICA/EPOCH"),
        (["--id", "r0", "--epoch", "-1", "--socket", "s"], "Must be >= 0"),
        (["--id", "r0", "--epoch", "1", "--socket", "s", "--threads", "0"], "Must be >= 1"),
        (
            ["--id=r0", "--epoch=1", "--socket=s", "--max-batch-tokens=8"],
            "max_batch_size=64: must be between 1 and max_batch_tokens=8",
        ),
        (["--id=r0", "--epoch=1", "--socket", "x" * 120], "at most 107"),
        (
            ["--id=r0", "--epoch=1", "--socket=s", "--device=tpu"],
            "accepted: cpu, cuda, cuda:N, auto",
        ),
        (["--id=r0", "--epoch=1", "--socket=s", "--weights=swap"], "Choose from"),
        (["--id=r0", "--epoch=1", "--socket", "/nowhere/r0.sock"], "/nowhere/r0.sock: [Errno 2]"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    child = spawn(tmp_path, *arguments)
    _, errors = child.communicate(timeout=20)
    assert child.returncode != 0
    assert message in errors


def test_loading_reports_the_watermark_and_describe_knows_it(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        client = await Client.connect("a", 1, zygotes.start("a"))
        progress = await client.load_model(model, 16)
        layers = [step.layers_ready for step in progress]
        assert layers == sorted(layers) and layers[-1] == progress[-1].layers_total == 4
        assert [bool(step.digest) for step in progress] == [False] * (len(layers) - 1) + [True]
        last = progress[-1]
        assert last.bytes_loaded == last.bytes_total == (model / "arena.bin").stat().st_size
        assert (last.source, last.block_tokens, last.blocks_total) == ("map", 64, 16)
        told = await client.stub.describe(pb.DescribeRequest())
        assert (told.model_digest, told.layers_ready) == (last.digest, 4)
        assert (told.blocks_used, told.blocks_total) == (0, 16)

        # Again is the same; other is refused until the first has gone.
        assert await client.load_model(model, 16) == [last]
        error = await refused(client.load_model(model, 17))
        assert error.status is Status.FAILED_PRECONDITION and "with 16 blocks" in error.message
        await client.stub.reset(pb.ResetRequest(unload_weights=True))
        assert (await client.stub.describe(pb.DescribeRequest())).model_digest == ""
        assert (await client.load_model(model, 17))[-1].blocks_total == 17
        await client.close()

    run(test())


def test_a_model_that_cannot_be_loaded_is_refused_with_the_reason(
    model: Path, zygotes: Zygote, tmp_path: Path
) -> None:
    """B.2 #47: weights are what they are said to be before anybody is served with them."""
    broken = make_tiny(tmp_path / "broken")
    with (broken / "arena.bin").open("r+b") as arena:
        arena.seek(90_000)
        arena.write(b"?")
    short = make_tiny(tmp_path / "short")
    os.truncate(short / "arena.bin", 1000)

    async def test() -> None:
        client = await Client.connect("b", 1, zygotes.start("b"))
        for path, blocks, status, words in [
            (tmp_path / "nowhere", 16, Status.INVALID_ARGUMENT, "model_path: "),
            (model, 0, Status.INVALID_ARGUMENT, "blocks_total: 0"),
            (broken, 16, Status.DATA_LOSS, "layer 0 of tiny has digest"),
            (short, 16, Status.DATA_LOSS, "arena.bin has 1000 bytes"),
        ]:
            error = await refused(client.load_model(path, blocks))
            assert (error.status, words in error.message) == (status, True), error.message
        # And it is still good for one that can.
        assert (await client.load_model(model, 16))[-1].digest
        await client.close()

    run(test())


def test_a_load_whose_caller_leaves_is_undone_and_can_be_made_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Replica] = []
    closed: list[Replica] = []
    begun, gate = threading.Event(), threading.Event()
    real_open, real_close = open_replica, Replica.close

    def slow_open(*arguments: Any, **named: Any) -> Replica:
        begun.set()
        assert gate.wait(10)
        opened.append(real_open(*arguments, **named))
        return opened[-1]

    def noted_close(replica: Replica, timeout_s: float) -> None:
        real_close(replica, timeout_s)
        closed.append(replica)

    monkeypatch.setattr("blitzd.engine.replica.open_replica", slow_open)
    monkeypatch.setattr(Replica, "close", noted_close)

    async def test() -> None:
        service = EngineService(
            Identity("l", 1), tmp_path / "l.kv.sock", ReplicaOptions(), crashed=print
        )
        call = pb.LoadModelRequest(model_path=str(model), blocks_total=16)
        leaving = service.load_model(call)
        assert (await anext(leaving)).digest == ""
        assert await asyncio.to_thread(begun.wait, 10)
        await leaving.aclose()  # type: ignore[attr-defined]
        assert (await service.describe(pb.DescribeRequest())).layers_total == 0
        gate.set()
        progress = [step async for step in service.load_model(call)]
        assert progress[-1].digest
        while not closed:  # noqa: ASYNC110 - in another thread
            await asyncio.sleep(0.005)
        assert len(opened) == 2 and len(closed) == 1
        await service.close()
        assert sorted(map(id, closed)) == sorted(map(id, opened))

    run(test())


def test_calls_that_need_a_model_say_so(zygotes: Zygote) -> None:
    async def test() -> None:
        client = await Client.connect("c", 1, zygotes.start("c"))
        error = await refused(client.prefill(request(1, "hello")))
        assert error.status is Status.FAILED_PRECONDITION
        assert error.message == "no model is loaded; LoadModel first"
        assert (await client.stub.health(pb.HealthRequest())).idle_ns == 0
        assert (await client.stub.cancel(pb.CancelRequest(request_ids=[1]))).cancelled == 0
        await client.stub.release_kv(pb.ReleaseKvRequest(request_ids=[1]))
        await client.stub.reset(pb.ResetRequest())
        await client.close()

    run(test())


def test_prefill_names_what_it_refuses(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        client = await up(zygotes, "d", model)
        for call, words in [
            (pb.PrefillRequest(), "request: missing"),
            (pb.PrefillRequest(request=request(1, "x" * 2048)), "context of 2048 leaves room"),
            (
                pb.PrefillRequest(request=request(1, "hello", temperature=-1)),
                "request.sampling.temperature: -1.0",
            ),
        ]:
            error = await refused(client.stub.prefill(call))
            assert error.status is Status.INVALID_ARGUMENT
            assert words in error.message
        await client.prefill(request(1, "hello", 200))
        error = await refused(client.prefill(request(1, "hello")))
        assert "request_id: 1 is here already" in error.message
        await client.close()

    run(test())


def test_cancel_and_reset_free_everything(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        client = await up(zygotes, "e", model)
        await client.prefill(request(1, "held", 9), hold=True)
        await client.until(1)
        for number in (2, 3, 4):
            await client.prefill(request(number, "x" * 100, 1500))
        reply = await client.stub.cancel(pb.CancelRequest(request_ids=[2, 99]))
        assert reply.cancelled == 1
        assert (await client.stub.describe(pb.DescribeRequest())).blocks_used > 0
        await client.stub.reset(pb.ResetRequest())
        await client.until_blocks_used(0)
        assert (await client.stub.describe(pb.DescribeRequest())).running == 0
        await client.prefill(request(2, "hello", 3))
        client.outputs.clear()
        assert len((await client.until(2)).tokens) == 3
        await client.close()

    run(test())


def test_a_new_watcher_ends_the_old_one_and_gets_what_comes_next(
    model: Path, zygotes: Zygote
) -> None:
    async def test() -> None:
        first = await up(zygotes, "f", model)
        second = Client("f", 1, first.process)
        await second.watch()
        assert first._watching is not None
        with pytest.raises(GRPCError, match="another watcher took over") as caught:
            await first._watching
        assert caught.value.status is Status.ABORTED
        await second.prefill(request(1, "hello", 4))
        assert len((await second.until(1)).tokens) == 4
        await second.close()
        first.channel.close()

    run(test())


def test_describe_and_health_answer_while_a_long_step_runs(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        client = await up(zygotes, "g", model, replica={"pace_layer_ms": 250.0})
        await client.prefill(request(1, "hello", 2))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        health = await client.stub.health(pb.HealthRequest())
        await client.stub.describe(pb.DescribeRequest())
        await client.stub.cancel(pb.CancelRequest(request_ids=[7]))
        assert time.monotonic() - began < 0.25, "they waited for the step"
        assert health.idle_ns > 100_000_000
        await client.until(1)
        await client.close()

    run(test())


def test_a_worker_that_no_daemon_hears_of_ends(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        client = await up(zygotes, "h", model, orphan_timeout_s=0.6)
        await asyncio.sleep(1.2)
        assert client.process.alive, "a watched worker is no orphan"
        await client.close()
        for _ in range(4):
            await asyncio.sleep(0.3)
            stub = Client("h", 1, client.process)
            await stub.stub.health(pb.HealthRequest())
            await stub.close()
        assert client.process.alive, "one whose health is asked for is none either"
        await client.process.wait(3.0)
        assert not client.process.socket.exists()

    run(test())


def test_sigterm_ends_a_worker_in_the_middle_of_its_work(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        client = await up(zygotes, "i", model)
        await client.prefill(request(1, "hello", 1500))
        await asyncio.sleep(0.1)
        client.process.kill(signal.SIGTERM)
        await client.process.wait(5.0)
        assert client._watching is not None
        with pytest.raises((StreamTerminatedError, GRPCError, OSError)):
            await client._watching
        client.channel.close()

    run(test())


def test_a_killed_workers_sockets_do_not_stop_its_successor(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        client = await up(zygotes, "j", model)
        client.process.kill()
        await client.process.wait()
        assert client.process.socket.exists()
        client.channel.close()
        zygotes.epochs["j"] -= 1
        again = await up(zygotes, "j", model)
        await again.prefill(request(1, "hello", 2))
        await again.until(1)
        await again.close()

    run(test())
