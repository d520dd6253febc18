"""A worker that waits has its model at hand, and notices when the files are others by then."""

import asyncio
import os
from pathlib import Path

import pytest

from blitzd.engine.errors import Corrupt
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.service import EngineService
from blitzd.engine.standby import Standby
from blitzd.fabric import Identity
from blitzd.proto.blitzd.engine import v1 as pb
from tests.engine.local_replica import request
from tests.tiny import make_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny")


def test_what_was_opened_ahead_is_taken_as_it_is(model: Path) -> None:
    standby, ahead, told = Standby(), [], []
    standby.warm(model, ReplicaOptions())
    first = standby.take(model, ahead.append)
    assert standby.take(model, told.append) is first
    [only] = ahead
    assert told == ahead
    assert (only.layers_ready, only.bytes_loaded, only.source) == (
        first.layout.layers,
        len(first.weights),
        "map",
    )


def test_without_a_head_start_it_is_opened_when_it_is_asked_for(model: Path) -> None:
    told: list[pb.LoadProgress] = []
    Standby().take(model, told.append)
    assert len(told) == len({progress.bytes_loaded for progress in told}) > 2


def test_another_model_takes_its_place(model: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other")
    standby = Standby()
    assert standby.take(model, print).directory == model
    assert standby.take(other, print).directory == other


def test_a_file_that_changed_is_hashed_again(model: Path) -> None:
    standby = Standby()
    standby.warm(model, ReplicaOptions())
    arena = model / "arena.bin"
    with arena.open("r+b") as handle:
        handle.seek(100)
        byte = handle.read(1)
        handle.seek(100)
        handle.write(bytes((byte[0] ^ 1,)))
    # Whatever the clock of the file system resolves.
    os.utime(arena, ns=(1, 1))
    with pytest.raises(Corrupt, match="has digest"):
        standby.take(model, lambda progress: None)
    with pytest.raises(Corrupt):
        standby.take(model, lambda progress: None)


def test_a_model_that_is_not_there_is_no_trouble_until_it_is_loaded(tmp_path: Path) -> None:
    Standby().warm(tmp_path / "nothing", ReplicaOptions())


def test_a_worker_that_was_warm_computes_what_a_cold_one_does(model: Path, tmp_path: Path) -> None:
    async def first_token(warm: bool) -> list[int]:
        service = EngineService(
            Identity("w", 1), tmp_path / f"w{warm}.sock", ReplicaOptions(), crashed=print
        )
        if warm:
            await asyncio.to_thread(service.standby.warm, model, ReplicaOptions())
        for _ in range(2):  # the second time what the first left is at hand
            call = pb.LoadModelRequest(model_path=str(model), blocks_total=16)
            steps = [step async for step in service.load_model(call)]
            assert steps[-1].digest
            reports = service.watch(pb.WatchRequest())
            await anext(reports)
            await service.prefill(pb.PrefillRequest(request=request(1, "hello", 4)))
            tokens: list[int] = []
            async for report in reports:
                tokens += report.token_ids
                if any(report.finish):
                    break
            await reports.aclose()  # type: ignore[attr-defined]
            await service.reset(pb.ResetRequest(unload_weights=True))
        await service.close()
        return tokens

    async def both() -> tuple[list[int], list[int]]:
        return await first_token(True), await first_token(False)

    warm, cold = asyncio.run(both())
    assert warm == cold and len(warm) == 4
