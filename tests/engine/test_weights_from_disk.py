"""A load from the disk is one: not from the page cache, and into memory of its own."""

import asyncio
import ctypes
import mmap
import os
from pathlib import Path

import pytest

from blitzd.engine.options import ReplicaOptions
from blitzd.engine.service import EngineService
from blitzd.engine.weights import drop_cached
from blitzd.fabric import Identity
from blitzd.proto.blitzd.engine import v1 as pb
from tests.tiny import make_tiny

OWN, HOST, DISK = pb.FileAccess.UNSPECIFIED, pb.FileAccess.HOST, pb.FileAccess.DISK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


def cached_pages(path: Path) -> int:
    with path.open("r+b") as handle, mmap.mmap(handle.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (-(-len(mapped) // mmap.PAGESIZE)))()
        first = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), pages)
        del first
        assert not failed, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages)


def maps(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_what_the_kernel_cached_of_the_file_is_let_go(model: Path) -> None:
    arena = model / "arena.bin"
    with arena.open("rb+") as handle:
        os.fsync(handle.fileno())
    before = arena.read_bytes()
    if not cached_pages(arena):
        pytest.skip("the file system of temporary files keeps nothing in the page cache")
    drop_cached(model)
    if cached_pages(arena) == -(-len(before) // mmap.PAGESIZE):
        pytest.skip("temporary files live in memory here: there is no disk to read")
    assert cached_pages(arena) == 0
    assert arena.read_bytes() == before


def test_without_a_file_there_is_nothing_to_let_go(tmp_path: Path) -> None:
    drop_cached(tmp_path)


@pytest.mark.parametrize(("file", "source"), [(DISK, "disk"), (HOST, "host"), (OWN, "map")])
def test_only_a_load_in_the_workers_own_way_maps_the_file(
    model: Path, tmp_path: Path, file: pb.FileAccess, source: str
) -> None:
    async def load() -> tuple[str, bool]:
        service = EngineService(
            Identity("d", 1), tmp_path / "d.kv.sock", ReplicaOptions(), crashed=print
        )
        call = pb.LoadModelRequest(model_path=str(model), blocks_total=16, file=file)
        progress = [step async for step in service.load_model(call)]
        mapped = await asyncio.to_thread(maps, model / "arena.bin")
        await service.close()
        return progress[-1].source, mapped

    assert asyncio.run(load()) == (source, file is OWN)
