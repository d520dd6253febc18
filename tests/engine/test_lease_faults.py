"""What can go wrong with a lease between two workers: it is known early, by name, and the
survivor keeps nothing of it."""

import asyncio
import signal
import time
from pathlib import Path

import pytest
from grpclib.server import Server

from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.layout import read_model_file
from blitzd.fabric import SharedArena, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import request
from tests.engine.test_handover import LENGTH, PROMPTS, TRANSPORTS, F, faulted, held, moved, pair
from tests.engine.test_worker import run
from tests.engine.workers import Client, Process, Zygote, up
from tests.tiny import make_tiny

SOON_S = 1.0
# 128 KiB of KV a token: a transfer of many chunks, and little to compute.
WIDE = {"layers": 2, "heads": 8, "kv_heads": 8, "head_dim": 1024, "ffn": 16}


async def until(check: object, what: str) -> float:
    """Seconds it took."""
    began = time.monotonic()
    while not await check():  # type: ignore[operator]
        assert time.monotonic() - began < 5 * SOON_S, what
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def arenas_mapped(process: Process) -> int:
    """KV arenas, its own among them."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return sum("memfd:blitzd-kv" in line for line in lines)


class SlowSource(pb.EngineBase):
    """Sends real bytes over UCX, a chunk at a time."""

    def __init__(self, path: Path, tokens: int, geometry: KvGeometry, pause_s: float) -> None:
        self.path = path
        self.geometry = geometry
        self.tokens = tokens
        self.pause_s = pause_s
        self.fabric = UcxFabric("slow/1")
        self.sending: asyncio.Task[int] | None = None
        self._arena = SharedArena(geometry.bytes)
        self._server = Server([self])

    async def __aenter__(self) -> "SlowSource":
        await self.fabric.start()
        await self._server.start(path=str(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        if self.sending is not None:
            await asyncio.gather(self.sending, return_exceptions=True)
        await self.fabric.close()
        self._arena.close()

    async def export_kv(self, message: pb.ExportKvRequest) -> pb.ExportKvReply:
        blocks = list(range(-(-self.tokens // self.geometry.block_tokens)))
        self.sending = asyncio.create_task(
            self.fabric.send(
                message.ucx_address,
                message.ucx_tag,
                self._arena.buffer,
                self.geometry.segments(blocks),
                time.monotonic() + 20,
                on_bytes=lambda _: time.sleep(self.pause_s),
            )
        )
        return pb.ExportKvReply(
            tokens=self.tokens, block_ids=blocks, ucx_address=self.fabric.address
        )


def test_an_import_that_gets_on_outlives_its_stall_limit_and_says_so(
    zygotes: Zygote, tmp_path: Path
) -> None:
    model = make_tiny(tmp_path / "wide", **WIDE)
    geometry = KvGeometry.of(read_model_file(model).config, 4)
    request_ = request(2, "x" * 190, 4)
    request_.output_tokens = [1]

    async def test() -> None:
        target = await up(zygotes, "d", model, 8)
        async with SlowSource(tmp_path / "slow.sock", 190, geometry, 0.05) as source:
            call = pb.ImportKvRequest(
                request=request_,
                lease_id=1,
                source_replica="slow",
                source_epoch=1,
                source_endpoint=str(source.path),
                transport=pb.Transport.UCX,
                stall_ms=400,
            )
            began = time.monotonic()
            reports = [r async for r in target.stub.import_kv(call, timeout=20)]
            took = time.monotonic() - began
        *beats, last = reports
        assert last.ended and last.fault is F.NONE, last
        assert last.bytes_moved == 3 * geometry.block_bytes
        assert took > 0.8, "longer than any two stall limits"
        moved_by = [beat.bytes_moved for beat in beats]
        assert moved_by == sorted(moved_by) and len(set(moved_by)) > 3, moved_by
        await target.until_blocks_used(0)
        await target.close()

    run(test())


@TRANSPORTS
def test_a_source_that_says_nothing_ends_the_import_long_before_its_deadline(
    model: Path, zygotes: Zygote, transport: pb.Transport
) -> None:
    """B.2 #28: and names the stage it was waiting in."""

    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2)
        source.process.kill(signal.SIGSTOP)
        began = time.monotonic()
        pull = target.import_from(source, moved(2, source), transport, stall_ms=300)
        error = await faulted(pull)
        assert 0.3 <= time.monotonic() - began < 0.3 + SOON_S
        assert error.fault is F.STALLED
        assert error.message == (
            f"p/{source.epoch}: waiting for ExportKv's answer; nothing came for 300 ms"
        )
        assert (await target.holdings()).blocks == 0
        source.process.kill(signal.SIGCONT)
        await target.import_from(source, moved(2, source), transport, lease_id=2)
        assert (await target.until(2)).ended
        for client in (source, target):
            await client.close()

    run(test())


@TRANSPORTS
def test_a_dead_peer_is_let_go_of_without_its_next_life(
    model: Path, zygotes: Zygote, transport: pb.Transport
) -> None:
    """B.2 #36: mappings and endpoints of a dead source go by themselves, and at once."""

    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2, 6)
        await target.import_from(source, moved(2, source), transport)
        await target.until(2)
        assert (await target.holdings()).peers == [f"p/{source.epoch}"]
        assert arenas_mapped(target.process) == (2 if transport is pb.Transport.MAP else 1)
        source.process.kill()

        async def gone() -> bool:
            return not (await target.holdings()).peers and arenas_mapped(target.process) == 1

        took = await until(gone, "the target still holds on to its dead source")
        print(f"{transport.name}: let go after {took * 1e3:.0f} ms")
        assert took < SOON_S
        for client in (source, target):
            await client.close()

    run(test())


@TRANSPORTS
def test_a_source_that_came_back_is_not_taken_for_its_last_life(
    model: Path, zygotes: Zygote, transport: pb.Transport
) -> None:
    """B.2 #42, #44, #45, #46: not by its name, nor by the path of its socket; and the target
    goes on with the new life as if nothing had been."""

    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2)
        await target.import_from(source, moved(2, source), transport)
        await target.until(2)
        old = moved(2, source)
        source.process.kill()
        await source.process.wait()
        again = await up(zygotes, "p", model, 64)
        await held(again, 2)
        # The new one listens where the old one did.
        old_path, new_path = source.process.socket, again.process.socket
        for suffix in (".sock", ".kv.sock"):
            old_path.with_suffix(suffix).unlink()
            old_path.with_suffix(suffix).symlink_to(new_path.with_suffix(suffix))
        again.process.socket = old_path
        stale = Client("p", source.epoch, again.process)
        error = await faulted(target.import_from(stale, old, transport, lease_id=2))
        assert error.fault is F.EPOCH
        assert f"source_epoch: {source.epoch}; this is p/{again.epoch}" in error.message
        assert (await target.holdings()).blocks == 0
        await target.import_from(again, moved(2, again), transport, lease_id=3)
        assert (await target.until(2)).ended
        assert (await target.holdings()).peers == [f"p/{again.epoch}"]
        for client in (source, again, stale, target):
            await client.close()

    run(test())


@TRANSPORTS
def test_a_newer_lease_takes_over_from_an_older_one_at_the_target(
    model: Path, zygotes: Zygote, transport: pb.Transport
) -> None:
    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2)
        expected = await alone(zygotes, model)
        source.process.kill(signal.SIGSTOP)
        first = asyncio.create_task(target.import_from(source, moved(2, source), transport))
        await target.until_blocks_used(1)
        second = asyncio.create_task(
            target.import_from(source, moved(2, source), transport, lease_id=2)
        )
        assert (await faulted(first)).fault is F.CANCELLED
        source.process.kill(signal.SIGCONT)
        await second
        late = await faulted(target.import_from(source, moved(2, source), transport, lease_id=1))
        assert late.fault in (F.REFUSED, F.NOT_HELD)
        assert (await target.until(2)).tokens == expected[1:]
        for client in (source, target):
            await client.close()

    run(test())


async def alone(zygotes: Zygote, model: Path) -> list[int]:
    one = await up(zygotes, "a", model)
    await one.prefill(request(2, PROMPTS[2], LENGTH))
    tokens = (await one.until(2)).tokens
    await one.close()
    return tokens


@TRANSPORTS
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_a_request_that_decodes_moves_on_without_a_token_missing_or_twice(
    model: Path, zygotes: Zygote, transport: pb.Transport, sampled: bool
) -> None:
    sampling = {"temperature": 0.9, "seed": 11, "presence_penalty": 0.5} if sampled else {}

    def wanted() -> pb.Request:
        return request(5, "Call me Ishmael. Some years ago", 200, ignore_eos=True, **sampling)

    async def test() -> None:
        first, second = await pair(zygotes, model, replica={"pace_layer_ms": 0.5})
        one = await up(zygotes, "a", model)
        await one.prefill(wanted())
        expected = (await one.until(5)).tokens
        await first.prefill(wanted())
        for _ in range(500):
            if len(first.outputs[5].tokens if 5 in first.outputs else []) >= 20:
                break
            await asyncio.sleep(0.005)
        reply = await first.stub.hold_requests(pb.HoldRequestsRequest(request_ids=[5, 99]))
        assert reply.request_ids == [5]
        here = await first.until(5)
        assert here.finish is pb.FinishReason.HELD
        assert 20 <= len(here.tokens) < 200
        again = wanted()
        again.output_tokens = list(here.tokens)
        await second.import_from(first, again, transport)
        await first.stub.release_kv(pb.ReleaseKvRequest(request_ids=[5]))
        there = await second.until(5)
        assert here.tokens + there.tokens == expected
        print(f"{len(here.tokens)} tokens here, {len(there.tokens)} there")
        for client in (first, second):
            await client.until_blocks_used(0)
            await client.close()
        await one.close()

    run(test())


def test_one_that_was_held_in_vain_goes_on_where_it_was(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        one = await up(zygotes, "a", model)
        await one.prefill(request(2, "The capital of France", 24))
        expected = (await one.until(2)).tokens
        await one.prefill(request(3, "The capital of France", 24))
        await one.stub.hold_requests(pb.HoldRequestsRequest(request_ids=[3]))
        await one.until(3)
        one.outputs[3].finish = pb.FinishReason.NONE
        await one.stub.resume_held(pb.ResumeHeldRequest(request_ids=[3]))
        assert (await one.until(3)).tokens == expected
        await one.until_blocks_used(0)
        await one.close()

    run(test())
