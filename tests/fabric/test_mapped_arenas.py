"""Arenas that peers map: exact copies, seals, identity, and owners or copiers that die."""

import asyncio
import contextlib
import mmap
import random
import signal
import socket
import time

import numpy as np
import pytest
from fabric_peers import PeerProcess, content, moved_digest
from hypothesis import given, settings, strategies as st

from blitzd.fabric import (
    ArenaServer,
    IdentityMismatch,
    MappedPeer,
    MappedPeers,
    PeerLost,
    SegmentError,
    SharedArena,
    TransferTimeout,
)

MIB = 1 << 20
ROUNDS = 100
WARM = 10
SIZE = 12 * MIB


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request):
    return "asyncio", {"use_uvloop": request.param}


def soon(seconds=5.0):
    return time.monotonic() + seconds


@contextlib.asynccontextmanager
async def served(tmp_path, size=3 * MIB, identity="r0/3"):
    arena = SharedArena(size)
    arena.bytes[:] = content(1, size)
    server = ArenaServer(tmp_path / "arena.sock", arena, identity)
    await server.start()
    try:
        yield arena, server
    finally:
        await server.close()
        arena.close()


def test_torch_sees_the_arena_and_writes_show_through():
    peer = PeerProcess("r0/1")  # torch stays out of this process, which forks a lot
    assert peer.call("torch_view") == 1.5
    peer.end()


def test_who_gets_the_descriptor_may_only_read():
    arena = SharedArena(mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, arena.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, 0).resize(1)
    arena.bytes[0] = 7
    assert mmap.mmap(arena.fd, arena.size, prot=mmap.PROT_READ)[0] == 7


def test_an_arena_larger_than_memory_is_refused_before_it_takes_any(monkeypatch):
    """The reservation itself must not be reached: it would take all there is."""
    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("reserved"))
    with pytest.raises(MemoryError, match="1152921504606846976 bytes; accepted: at most"):
        SharedArena(1 << 60, prefault=True)


@st.composite
def cuts(draw):
    size = draw(st.integers(1, 3 * MIB))

    def one(total):
        marks = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
        lengths = [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        return draw(st.permutations(list(zip(starts, lengths, strict=True))))

    total = draw(st.integers(0, size))
    return size, one(total), one(total)


@settings(max_examples=40, deadline=None)
@given(cuts())
def test_any_segment_lists_are_copied_exactly(tmp_path_factory, cut):
    size, source, target = cut

    async def run():
        async with served(tmp_path_factory.mktemp("arena"), size) as (arena, server):
            peer = await MappedPeer.connect(server.path, "r0/3", soon())
            buffer = np.zeros(size, dtype=np.uint8)
            moved = await peer.copy(source, buffer, target, soon())
            expected = np.concatenate([arena.bytes[o : o + n] for o, n in source])
            arrived = np.concatenate([buffer[o : o + n] for o, n in target])
            assert moved == len(expected)
            assert np.array_equal(arrived, expected)
            peer.close()

    asyncio.run(run())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("source", "target", "word"),
    [
        ([(0, 11)], [(0, 11)], "source_segments"),
        ([(-1, 2)], [(0, 2)], "source_segments"),
        ([(0, 2)], [(9, 2)], "target_segments"),
        ([(0, 4)], [(0, 2), (1, 2)], "two segments"),
        ([(0, 4)], [(0, 3)], "4 bytes"),
    ],
)
async def test_bad_segments_are_refused_by_name(tmp_path, source, target, word):
    async with served(tmp_path, 10) as (_, server):
        peer = await MappedPeer.connect(server.path, "r0/3", soon())
        buffer = np.zeros(10, dtype=np.uint8)
        with pytest.raises(SegmentError, match=word):
            await peer.copy(source, buffer, target, soon())
        assert not buffer.any()
        with pytest.raises(SegmentError, match="read-only"):
            await peer.copy([(0, 4)], b"1234567890", [(0, 4)], soon())
        peer.close()


@pytest.mark.anyio
async def test_another_epoch_is_refused_and_named(tmp_path):
    async with served(tmp_path, identity="r0/4") as (_, server):
        with pytest.raises(IdentityMismatch, match="expected r0/3, found r0/4"):
            await MappedPeer.connect(server.path, "r0/3", soon())


@pytest.mark.anyio
async def test_nobody_serves(tmp_path):
    with pytest.raises(PeerLost):
        await MappedPeer.connect(tmp_path / "none.sock", "r0/3", soon())


@pytest.mark.anyio
async def test_a_server_that_never_answers_is_left_at_the_deadline(tmp_path):
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        start = time.monotonic()
        with pytest.raises(TransferTimeout):
            await MappedPeer.connect(tmp_path / "mute.sock", "r0/3", soon(0.2))
        assert time.monotonic() - start < 1.0


@pytest.mark.anyio
async def test_a_peer_that_says_nothing_is_hung_up_on(tmp_path, monkeypatch):
    monkeypatch.setattr("blitzd.fabric.arena_server.HANDSHAKE_S", 0.1)
    async with served(tmp_path) as (_, server):
        reader, writer = await asyncio.open_unix_connection(server.path)
        async with asyncio.timeout(2.0):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.anyio
async def test_one_mapping_a_peer_until_its_next_epoch(tmp_path):
    peers = MappedPeers()
    async with served(tmp_path) as (_, server):
        first = await peers.get(server.path, "r0/3", soon())
        assert await peers.get(server.path, "r0/3", soon()) is first
    async with served(tmp_path, identity="r0/4") as (_, server):
        second = await peers.get(server.path, "r0/4", soon())
        assert second.alive and not first.alive
        with pytest.raises(IdentityMismatch, match="retired"):
            await peers.get(server.path, "r0/3", soon())
    peers.close()


@pytest.mark.anyio
async def test_a_cancelled_copy_writes_no_more(tmp_path):
    size = 64 * MIB
    async with served(tmp_path, size) as (_, server):
        peer = await MappedPeer.connect(server.path, "r0/3", soon())
        buffer = np.zeros(size, dtype=np.uint8)
        seen = []

        def slow(count):
            seen.append(count)
            time.sleep(0.01)

        whole = [(0, size)]
        task = asyncio.create_task(peer.copy(whole, buffer, whole, soon(), slow))
        async with asyncio.timeout(5.0):
            while not seen:  # noqa: ASYNC110 (told from another thread)
                await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen[-1] < size
        buffer[:] = 0
        await asyncio.sleep(0.1)
        assert not buffer.any()
        peer.close()


@pytest.mark.anyio
async def test_a_deadline_in_mid_copy(tmp_path):
    size = 64 * MIB
    async with served(tmp_path, size) as (_, server):
        peer = await MappedPeer.connect(server.path, "r0/3", soon())
        buffer = np.empty(size, dtype=np.uint8)
        whole = [(0, size)]
        with pytest.raises(TransferTimeout):
            await peer.copy(whole, buffer, whole, soon(0.05), lambda _: time.sleep(0.02))
        assert await peer.copy(whole, buffer, whole, soon()) == size
        peer.close()


@pytest.mark.anyio
async def test_a_process_forked_after_a_copy_copies_too(tmp_path):
    async with served(tmp_path) as (_, server):
        peer = await MappedPeer.connect(server.path, "r0/3", soon())
        buffer = np.zeros(8, dtype=np.uint8)
        await peer.copy([(0, 8)], buffer, [(0, 8)], soon())
        peer.close()
        child = PeerProcess("child/1")
        outcome = await asyncio.to_thread(
            child.call,
            "copy",
            path=str(server.path),
            identity="r0/3",
            source=[(0, 8)],
            size=8,
            target=[(0, 8)],
        )
        assert outcome.get("moved") == 8, outcome
        child.end()


def pieces(seed):
    starts = list(range(0, SIZE, 98_304))
    random.Random(seed).shuffle(starts)
    return [(start, min(98_304, SIZE - start)) for start in starts]


@pytest.mark.parametrize("rounds", [40, pytest.param(ROUNDS, marks=pytest.mark.slow)])
def test_the_owner_is_killed_many_times_in_mid_copy(tmp_path, rounds):
    """The copier kills it, and waits for its end, while it copies."""
    copier, spare = PeerProcess("copier/1"), PeerProcess("spare/1")
    spare.call("serve_arena", path=f"{tmp_path}/spare", seed=99, size=SIZE)
    path, usage = f"{tmp_path}/victim", {}
    victim = PeerProcess("victim/0")
    victim.call("serve_arena", path=path, seed=0, size=SIZE)
    whole = [(0, SIZE)]
    part = [(0, 4 * MIB)]
    try:
        for round_ in range(rounds):
            beside = copier.post(
                "copy",
                path=f"{tmp_path}/spare",
                identity="spare/1",
                source=part,
                size=4 * MIB,
                target=part,
            )
            outcome = copier.call(
                "copy",
                path=path,
                identity=f"victim/{round_}",
                source=pieces(round_),
                size=SIZE,
                target=whole,
                kill_at=(victim.pid, random.Random(round_).randrange(1, SIZE // 2)),
            )
            assert victim.gone() == -signal.SIGKILL
            assert outcome.get("error") == "PeerLost", outcome
            assert outcome["took"] < 1.0
            victim = PeerProcess(f"victim/{round_ + 1}")
            victim.call("serve_arena", path=path, seed=round_ + 1, size=SIZE)
            again = copier.call(
                "copy",
                path=path,
                identity=f"victim/{round_ + 1}",
                source=[(0, MIB)],
                size=MIB,
                target=[(0, MIB)],
            )
            assert again.get("digest") == moved_digest(round_ + 1, SIZE, [(0, MIB)]), again
            assert copier.reply(beside).get("digest") == moved_digest(99, SIZE, part)
            if round_ in (WARM - 1, rounds - 1):
                usage[round_] = copier.call("usage")
        assert usage[rounds - 1]["fds"] <= usage[WARM - 1]["fds"]
    finally:
        for peer in (copier, spare, victim):
            peer.end()


@pytest.mark.slow
def test_the_copier_is_killed_a_hundred_times_in_mid_copy(tmp_path):
    owner = PeerProcess("owner/1")
    path, usage, whole = f"{tmp_path}/owner", {}, [(0, SIZE)]
    owner.call("serve_arena", path=path, seed=5, size=SIZE)
    arguments = {"path": path, "identity": "owner/1", "source": whole, "target": whole}
    try:
        for round_ in range(ROUNDS):
            copier = PeerProcess(f"copier/{round_}")
            at = random.Random(round_).randrange(1, SIZE // 2)
            copier.post("copy", size=SIZE, die_at=at, **arguments)
            assert copier.gone() == -signal.SIGKILL
            if round_ in (WARM - 1, ROUNDS - 1):
                usage[round_] = owner.call("usage")
        copier = PeerProcess(f"copier/{ROUNDS}")
        outcome = copier.call("copy", size=SIZE, **arguments)
        assert outcome.get("digest") == moved_digest(5, SIZE, whole), outcome
        copier.end()
        assert owner.alive
        assert usage[ROUNDS - 1]["fds"] <= usage[WARM - 1]["fds"] + 1
    finally:
        owner.end()
