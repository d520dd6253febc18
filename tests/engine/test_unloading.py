"""A model that goes while another comes, or while one is read to be kept for others: the calls
of a daemon that changes its mind may cross."""

import asyncio
import threading
from pathlib import Path

import pytest

from blitzd.engine.errors import NotReady
from blitzd.engine.layout import read_model_file
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.service import EngineService
from blitzd.fabric import Identity, MappedPeers
from blitzd.proto.blitzd.engine import v1 as pb
from tests.tiny import make_tiny

UNLOAD = pb.ResetRequest(unload_weights=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model")


def opened(tmp_path: Path) -> EngineService:
    return EngineService(Identity("u", 1), tmp_path / "u.kv.sock", ReplicaOptions(), crashed=print)


async def load(service: EngineService, model: Path) -> pb.LoadProgress:
    call = pb.LoadModelRequest(model_path=str(model), blocks_total=16)
    return [progress async for progress in service.load_model(call)][-1]


def asks_for(model: Path) -> pb.ServeWeightsRequest:
    """Of a neighbour, for no byte: all that it says is whether the weights are on offer."""
    file = read_model_file(model)
    size = file.layout.length
    return pb.ServeWeightsRequest(
        source_epoch=1, model_digest=file.config.digest, offset=size, transport=pb.Transport.MAP
    )


async def gives(service: EngineService, model: Path) -> bool:
    try:
        await service.serve_weights(asks_for(model))
    except NotReady as error:
        return "cannot be mapped" in str(error)
    return True


def test_a_load_that_comes_while_the_last_model_goes_is_whole(model: Path, tmp_path: Path) -> None:
    """It gives its weights, and its KV can be mapped."""

    async def talk() -> None:
        service = opened(tmp_path)
        for _ in range(3):
            await load(service, model)
            going = asyncio.create_task(service.reset(UNLOAD))
            await asyncio.sleep(0)
            assert (await load(service, model)).digest
            await going
            assert await gives(service, model)
            peers = MappedPeers()
            deadline = asyncio.get_running_loop().time() + 5
            await peers.get(str(tmp_path / "u.kv.sock"), "u/1", deadline)
            peers.close()
            await service.reset(UNLOAD)
        assert not await gives(service, model)
        await service.close()

    asyncio.run(talk())


def test_who_is_told_to_let_go_while_it_still_reads_keeps_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk() -> None:
        service = opened(tmp_path)
        begun, go_on = threading.Event(), threading.Event()
        take = service.standby.take

        def slowly(*args: object) -> object:
            begun.set()
            assert go_on.wait(10)
            return take(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(service.standby, "take", slowly)
        call = pb.HoldWeightsRequest(model_path=str(model))
        holding = asyncio.create_task(service.hold_weights(call))
        await asyncio.to_thread(begun.wait, 10)
        await service.reset(UNLOAD)
        go_on.set()
        with pytest.raises(NotReady, match="let go"):
            await holding
        assert not await gives(service, model)
        await service.close()

    asyncio.run(talk())
