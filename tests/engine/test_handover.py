"""A request moves from a worker to another: exact tokens, precise failures, nothing leaked."""

import asyncio
import signal
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Status
from grpclib.server import Server

from blitzd.engine.exporter import layer_checksums
from blitzd.engine.kv_cache import KvCache
from blitzd.engine.kv_geometry import KvGeometry
from blitzd.engine.layout import read_model_file
from blitzd.engine.token_logprobs import TokenLogprobs
from blitzd.fabric import ArenaServer, PeerLost, SharedArena, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import LocalReplica, Output, request
from tests.engine.test_worker import refused, run
from tests.engine.workers import Client, ImportFailed, Zygote, imported, up
from tests.tiny import make_tiny

TRANSPORTS = pytest.mark.parametrize(
    "transport", [pb.Transport.MAP, pb.Transport.UCX], ids=lambda t: t.name.lower()
)
F = pb.HandoverFault
LENGTH = 24
PROMPTS = {
    1: "a",
    2: "The capital of France",
    3: "x" * 63,
    4: "y" * 64,
    5: "z" * 65,
    6: "naïve café: " * 40,
    7: "stop here",
    8: "everything at once, everything at once",
    9: "everything at once, everything at once",
    10: "penalties alone penalties alone",
}
EVERYTHING: dict[str, Any] = {
    "temperature": 1.1,
    "seed": 2**63 + 5,
    "top_k": 40,
    "top_p": 0.97,
    "min_p": 0.001,
    "typical_p": 0.95,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.7,
    "repetition_penalty": 1.2,
    "bias_token_ids": [10, 65],
    "bias_values": [1.5, -2.0],
    "stop": ["never there"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "min_tokens": 4,
    "logprobs": 3,
}
SAMPLING: dict[int, dict[str, Any]] = {
    7: {"temperature": 0.8, "seed": 3, "stop": ["never", "e"], "min_tokens": 5},
    8: EVERYTHING,
    9: EVERYTHING | {"seed": 4},
    # Greedy, and strong enough that every output token decides about those after it.
    10: {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5},
}


def moved(number: int, source: Client) -> pb.Request:
    """The request as the daemon passes it on: with the tokens that are there already."""
    again = request(number, PROMPTS[number], LENGTH, **SAMPLING.get(number, {}))
    again.output_tokens = list(source.outputs[number].tokens)
    return again


async def held(source: Client, *numbers: int) -> None:
    for number in numbers:
        sampling = SAMPLING.get(number, {})
        await source.prefill(request(number, PROMPTS[number], LENGTH, **sampling), hold=True)
    for number in numbers:
        assert (await source.until(number)).finish is pb.FinishReason.HELD


async def faulted(call: Awaitable[object]) -> ImportFailed:
    with pytest.raises(ImportFailed) as caught:
        await call
    assert caught.value.message
    return caught.value


async def pair(zygotes: Zygote, model: Path, **options: object) -> tuple[Client, Client]:
    source = await up(zygotes, "p", model, 64, **options)
    # Another size, so that blocks lie elsewhere in the target's arena.
    target = await up(zygotes, "d", model, 48, verify_kv=True, **options)
    return source, target


def assert_same_logprobs(
    found: dict[int, TokenLogprobs], expected: dict[int, TokenLogprobs]
) -> None:
    assert found.keys() == expected.keys()
    for position, (value, top) in expected.items():
        assert found[position].logprob == pytest.approx(value, abs=1e-5)
        assert [token for token, _ in found[position].top] == [token for token, _ in top]


@TRANSPORTS
@pytest.mark.parametrize("staged", [False, True], ids=["in-place", "staged"])
def test_tokens_and_text_are_those_of_one_worker(
    model: Path, zygotes: Zygote, transport: pb.Transport, staged: bool
) -> None:
    """B.2 #37. In place, as on a CPU, or with KV in memory of a device's own, staged for the
    move."""
    alone = LocalReplica(model)
    for number, prompt in PROMPTS.items():
        alone.prefill(request(number, prompt, LENGTH, **SAMPLING.get(number, {})))
    alone.prefill(request(99, PROMPTS[10], LENGTH))
    expected = alone.until(*PROMPTS)
    plain = alone.until(99)[99]
    alone.close()

    async def test() -> None:
        source, target = await pair(zygotes, model, staged=staged)
        await held(source, *PROMPTS)
        for number in PROMPTS:
            reply = await target.import_from(source, moved(number, source), transport)
            assert reply.bytes_moved > 0 and reply.elapsed_ns > 0
        for number in PROMPTS:
            there = await target.until(number)
            here = source.outputs[number]
            assert here.tokens + there.tokens == expected[number].tokens
            assert here.text + there.text == expected[number].text
            assert there.finish is expected[number].finish
            assert not here.logprobs.keys() & there.logprobs.keys()
            both = here.logprobs | there.logprobs
            assert_same_logprobs(both, expected[number].logprobs)
            assert len(both) == (len(expected[number].tokens) if number in (8, 9) else 0)
        assert expected[8].tokens != expected[9].tokens
        assert len(set(expected[10].tokens)) > len(set(plain.tokens))
        reply = await source.stub.release_kv(pb.ReleaseKvRequest(request_ids=list(PROMPTS)))
        assert reply.released == len(PROMPTS)
        for client in (source, target):
            await client.until_blocks_used(0)
            await client.close()

    run(test())


def test_what_an_import_names_wrongly_is_refused_by_name(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2)
        good = moved(2, source)
        whole = pb.ImportKvRequest(
            request=good,
            lease_id=1,
            source_replica="p",
            source_epoch=source.epoch,
            source_endpoint=str(source.process.socket),
            transport=pb.Transport.MAP,
        )
        for field, value, words in [
            ("request", None, "request: missing"),
            ("lease_id", 0, "lease_id: 0"),
            ("source_replica", "p/q", "source_replica, source_epoch: "),
            ("source_endpoint", "", "source_endpoint: empty"),
            ("transport", pb.Transport.UNSPECIFIED, "transport: unspecified"),
            ("request", request(2, PROMPTS[2], LENGTH), "request.output_tokens: empty"),
        ]:
            kept = getattr(whole, field)
            setattr(whole, field, value)
            error = await refused(imported(target.stub, whole))
            assert (error.status, words in error.message) == (Status.INVALID_ARGUMENT, True)
            setattr(whole, field, kept)
        assert (await target.stub.describe(pb.DescribeRequest())).blocks_used == 0
        good.max_tokens = 1500
        await imported(target.stub, whole)
        twice = await faulted(imported(target.stub, whole))
        assert (twice.fault, "request_id: 2 is here already" in twice.message) == (F.REFUSED, True)
        for client in (source, target):
            await client.close()

    run(test())


def test_every_failure_says_what_it_is_and_frees_the_blocks(
    model: Path, zygotes: Zygote, tmp_path: Path
) -> None:
    """B.2 #32: among them a layout that does not fit, known at the handshake."""

    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2, 6)

        async def fails(call: object, fault: F, words: str) -> None:
            error = await faulted(call)  # type: ignore[arg-type]
            assert (error.fault, words in error.message) == (fault, True), error.message
            assert (await target.stub.describe(pb.DescribeRequest())).blocks_used == 0

        def from_source(number: int, from_: Client = source, **changes: object) -> object:
            again = moved(number, source)
            for name, value in changes.items():
                setattr(again, name, value)
            return target.import_from(from_, again, pb.Transport.MAP, lease_id=4)

        # Not held there, or not any more.
        await fails(from_source(2, request_id=77), F.NOT_HELD, "77 is not here")
        # An epoch that is not the source's.
        stale = Client("p", source.epoch + 1, source.process)
        await fails(from_source(2, stale), F.EPOCH, f"this is p/{source.epoch}")
        # Not the tokens that the source has.
        await fails(from_source(2, prompt_tokens=[1, 2, 3]), F.MISMATCH, "KV of 21 tokens")
        # A lease that a newer one has replaced.
        await target.import_from(source, moved(2, source), pb.Transport.MAP, lease_id=5)
        await target.stub.cancel(pb.CancelRequest(request_ids=[2]))
        await target.until_blocks_used(0)
        await fails(from_source(2), F.NOT_HELD, "lease_id: 4; request 2 is leased to 5")
        # No such source.
        nobody = Client("p", source.epoch, source.process)
        nobody.process = type(source.process)(source.process.pid, tmp_path / "nobody.sock")
        await fails(from_source(2, nobody), F.SOURCE, "is gone: ")
        # Other weights of the same shape: the KV would mean something else.
        other = await up(zygotes, "o", make_tiny(tmp_path / "other", "float64", seed=1))
        await held(other, 2)
        error = await faulted(
            other.import_from(source, moved(2, source), pb.Transport.MAP, lease_id=9)
        )
        assert "is here already" in error.message
        await other.stub.release_kv(pb.ReleaseKvRequest(request_ids=[2]))
        error = await faulted(
            other.import_from(source, moved(2, source), pb.Transport.MAP, lease_id=9)
        )
        assert error.fault is F.MISMATCH
        assert f"p/{source.epoch}: layout: " in error.message
        for client in (source, target, other, stale, nobody):
            await client.close()

    run(test())


def test_no_room_is_said_before_anything_moves(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        source = await up(zygotes, "p", model)
        target = await up(zygotes, "d", model, 10)
        await held(source, 6)
        await target.prefill(request(9, "q" * 100, 9), hold=True)
        await target.until(9)
        error = await faulted(target.import_from(source, moved(6, source), pb.Transport.MAP))
        assert error.fault is F.NO_ROOM
        assert "9 KV blocks wanted" in error.message
        for client in (source, target):
            await client.close()

    run(test())


@TRANSPORTS
def test_a_source_that_hangs_ends_the_import_at_the_callers_deadline(
    model: Path, zygotes: Zygote, transport: pb.Transport
) -> None:
    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2)
        source.process.kill(signal.SIGSTOP)
        began = time.monotonic()
        error = await faulted(target.import_from(source, moved(2, source), transport, timeout=0.8))
        assert time.monotonic() - began < 0.8
        assert error.fault is F.DEADLINE
        assert f"p/{source.epoch}: waiting for ExportKv's answer" in error.message
        assert (await target.stub.describe(pb.DescribeRequest())).blocks_used == 0
        source.process.kill(signal.SIGCONT)
        # The same lease again, and now it works.
        await target.import_from(source, moved(2, source), transport)
        assert (await target.until(2)).ended
        for client in (source, target):
            await client.close()

    run(test())


@TRANSPORTS
def test_cancel_ends_an_import_and_frees_its_blocks(
    model: Path, zygotes: Zygote, transport: pb.Transport
) -> None:
    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2)
        source.process.kill(signal.SIGSTOP)
        call = asyncio.create_task(target.import_from(source, moved(2, source), transport))
        await target.until_blocks_used(1)
        twice = await faulted(target.import_from(source, moved(2, source), transport))
        assert "is being imported already" in twice.message
        reply = await target.stub.cancel(pb.CancelRequest(request_ids=[2]))
        assert reply.cancelled == 1
        error = await faulted(call)
        assert error.fault is F.CANCELLED
        assert "cancelled while it was imported" in error.message
        assert (await target.stub.describe(pb.DescribeRequest())).blocks_used == 0
        source.process.kill(signal.SIGCONT)
        for client in (source, target):
            await client.close()

    run(test())


@TRANSPORTS
def test_a_daemon_that_hangs_up_in_the_middle_leaves_no_reservation(
    model: Path, zygotes: Zygote, transport: pb.Transport
) -> None:
    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2)
        source.process.kill(signal.SIGSTOP)
        leaving = Client("d", target.epoch, target.process)
        call = asyncio.create_task(leaving.import_from(source, moved(2, source), transport))
        await target.until_blocks_used(1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        leaving.channel.close()
        await target.until_blocks_used(0)
        source.process.kill(signal.SIGCONT)
        for client in (source, target):
            await client.close()

    run(test())


def test_blocks_released_under_a_mapped_copy_are_never_adopted(
    model: Path, zygotes: Zygote
) -> None:
    """The copy itself cannot notice; the lease is asked for again before its result is used."""

    async def test() -> None:
        source, _ = await pair(zygotes, model)
        await held(source, 2)
        export = pb.ExportKvRequest(
            request_id=2,
            lease_id=3,
            source_epoch=source.epoch,
            transport=pb.Transport.MAP,
            layout=await layout_of(source),
        )
        confirm = pb.ExportKvRequest(
            request_id=2, lease_id=3, source_epoch=source.epoch, layout=export.layout
        )
        refusal = await source.stub.export_kv(confirm)
        assert refusal.fault is F.NOT_HELD
        assert "leased to nobody" in refusal.reason
        there = await source.stub.export_kv(export)
        again = await source.stub.export_kv(confirm)
        assert (again.tokens, again.block_ids) == (there.tokens, there.block_ids)
        await source.stub.release_kv(pb.ReleaseKvRequest(request_ids=[2]))
        assert (await source.stub.export_kv(confirm)).fault is F.NOT_HELD
        await source.close()

    run(test())


def test_a_held_request_can_go_on_at_its_source(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        source, target = await pair(zygotes, model)
        await target.prefill(request(6, PROMPTS[6], LENGTH))
        expected = (await target.until(6)).tokens
        await held(source, 6)
        go_on = pb.ResumeHeldRequest(request_ids=[6, 99])
        source.outputs[6].finish = pb.FinishReason.NONE
        await source.stub.resume_held(go_on)
        assert (await source.until(6)).tokens == expected
        # Once it goes on here no target gets it, and asking again changes nothing.
        await source.stub.resume_held(go_on)
        elsewhere = moved(6, source)
        elsewhere.output_tokens = elsewhere.output_tokens[:1]
        error = await faulted(target.import_from(source, elsewhere, pb.Transport.MAP, lease_id=9))
        assert (error.fault, "6 is not here" in error.message) == (F.NOT_HELD, True)
        await source.until_blocks_used(0)
        for client in (source, target):
            await client.close()

    run(test())


async def layout_of(source: Client) -> str:
    """What the source's KV is called, from its own refusal of another."""
    export = pb.ExportKvRequest(request_id=1, lease_id=1, source_epoch=source.epoch, layout="?")
    refusal = await source.stub.export_kv(export)
    assert refusal.fault is F.MISMATCH
    return refusal.reason.split(" has ")[1].split(":")[0]


def test_releasing_ends_a_send_that_nobody_receives(model: Path, zygotes: Zygote) -> None:
    async def test() -> None:
        source, target = await pair(zygotes, model)
        await held(source, 2)
        idle = UcxFabric("idle/1")
        await idle.start()
        export = pb.ExportKvRequest(
            request_id=2,
            lease_id=1,
            source_epoch=source.epoch,
            transport=pb.Transport.UCX,
            ucx_address=idle.address,
            ucx_tag=idle.new_tag(),
            layout=await layout_of(source),
        )
        geometry = KvGeometry.of(read_model_file(model).config, 1)

        async def nothing_comes(there: pb.ExportKvReply, tag: int) -> None:
            buffer = bytearray(geometry.bytes)
            whole = [(0, geometry.bytes)]
            with pytest.raises(PeerLost, match="gave the transfer up"):
                await idle.receive(there.ucx_address, tag, buffer, whole, time.monotonic() + 5)
            assert not any(buffer)

        there = await source.stub.export_kv(export)
        # The daemon tries another target; the first one's send does not stand in its way.
        await target.import_from(source, moved(2, source), pb.Transport.UCX, lease_id=2)
        assert (await target.until(2)).ended
        await nothing_comes(there, export.ucx_tag)
        refusal = await source.stub.export_kv(export)
        assert "lease_id: 1; request 2 is leased to 2" in refusal.reason
        export.lease_id = 3
        export.ucx_tag = idle.new_tag()
        there = await source.stub.export_kv(export)
        began = time.monotonic()
        await source.stub.release_kv(pb.ReleaseKvRequest(request_ids=[2]))
        assert time.monotonic() - began < 1.0
        await source.until_blocks_used(0)
        # Nothing of those blocks leaves any more: they may be another's by now.
        await nothing_comes(there, export.ucx_tag)
        await idle.close()
        for client in (source, target):
            await client.close()

    run(test())


class LyingSource(pb.EngineBase):
    """Serves a real arena, of zeros, under an identity of its own."""

    def __init__(self, directory: Path, blocks: int, arena: SharedArena) -> None:
        self.path = directory / "liar-1.sock"
        self.kv_path = directory / "liar-1.kv.sock"
        self.blocks = blocks
        self.holds = True
        self.checksums: list[int] = []
        self._arenas = ArenaServer(self.kv_path, arena, "liar/1")
        self._server = Server([self])

    async def __aenter__(self) -> "LyingSource":
        await self._arenas.start()
        await self._server.start(path=str(self.path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._arenas.close()

    async def export_kv(self, message: pb.ExportKvRequest) -> pb.ExportKvReply:
        if message.transport is pb.Transport.UNSPECIFIED and not self.holds:
            return pb.ExportKvReply(fault=F.NOT_HELD, reason="released meanwhile")
        return pb.ExportKvReply(
            tokens=21,
            block_ids=[3],
            map_path=str(self.kv_path),
            blocks_total=self.blocks,
            layer_checksums=self.checksums,
        )


def test_what_cannot_be_confirmed_or_is_not_what_was_sent_is_not_adopted(
    model: Path, zygotes: Zygote, tmp_path: Path
) -> None:
    geometry = KvGeometry.of(read_model_file(model).config, 8)
    arena = SharedArena(geometry.bytes)
    zeros = layer_checksums(geometry, arena.buffer, [3])

    async def test() -> None:
        target = await up(zygotes, "d", model, verify_kv=True)
        async with LyingSource(tmp_path, 8, arena) as source:
            request_ = request(2, PROMPTS[2], LENGTH)
            request_.output_tokens = [1]
            call = pb.ImportKvRequest(
                request=request_,
                lease_id=1,
                source_replica="liar",
                source_epoch=1,
                source_endpoint=str(source.path),
                transport=pb.Transport.MAP,
            )
            source.checksums = [*zeros[:-1], zeros[-1] ^ 1]
            error = await faulted(imported(target.stub, call))
            assert error.fault is F.CORRUPT
            sums = (error.report.source_checksum, error.report.target_checksum)
            assert (error.report.layer, sums) == (3, (zeros[-1] ^ 1, zeros[-1]))
            assert f"layer 3 has checksum {zeros[-1]:016x}" in error.message
            source.checksums, source.holds = zeros, False
            error = await faulted(imported(target.stub, call))
            assert (error.fault, error.message) == (F.NOT_HELD, "liar/1: released meanwhile")
            told = await target.stub.describe(pb.DescribeRequest())
            assert (told.blocks_used, told.running) == (0, 0)
            assert target.last.step == 0, "nothing was run"
            source.holds = True
            await imported(target.stub, call)
            assert (await target.until(2)).ended
        await target.close()

    run(test())
    arena.close()


def test_kv_that_is_not_finite_ends_its_request_and_what_lies_behind_it_none(
    model: Path, zygotes: Zygote, tmp_path: Path
) -> None:
    geometry = KvGeometry.of(read_model_file(model).config, 8)
    arena = SharedArena(geometry.bytes)
    block = KvCache(geometry, arena.buffer).tensor[:, :, 3]

    async def test() -> None:
        target = await up(zygotes, "d", model)
        async with LyingSource(tmp_path, 8, arena) as source:

            async def continued(number: int) -> Output:
                """Beside a longer one, so that attention masks the ends of both."""
                beside = request(number + 100, PROMPTS[8], 2 * LENGTH, ignore_eos=True)
                await target.stub.prefill(pb.PrefillRequest(request=beside))
                request_ = request(number, PROMPTS[2], LENGTH, ignore_eos=True)
                request_.output_tokens = [1]
                call = pb.ImportKvRequest(
                    request=request_,
                    lease_id=number,
                    source_replica="liar",
                    source_epoch=1,
                    source_endpoint=str(source.path),
                    transport=pb.Transport.MAP,
                )
                await imported(target.stub, call)
                assert not (await target.until(number + 100)).error
                return await target.until(number)

            expected = await continued(2)
            assert len(expected.tokens) == LENGTH - 1
            block[:, :, 21:] = float("nan")
            found = await continued(3)
            assert (found.error, found.tokens) == ("", expected.tokens)
            block[1, 0, 5] = float("nan")
            found = await continued(4)
            assert found.error.startswith("the model's hidden states at position 21 are not finite")
            block.zero_()
            assert (await continued(5)).tokens == expected.tokens
        await target.until_blocks_used(0)
        await target.close()

    run(test())
    arena.close()
