"""Work on blocks that a call starts outlives the call, but never the blocks."""

import asyncio
import threading

import pytest

from blitzd.engine.calls import to_the_end


def test_a_cancelled_caller_waits_for_the_end_of_the_work() -> None:
    started, go_on = threading.Event(), threading.Event()
    worked: list[list[int]] = []

    def work(blocks: list[int]) -> None:
        started.set()
        assert go_on.wait(10)
        worked.append(blocks)

    async def test() -> None:
        call = asyncio.create_task(to_the_end(work, [3, 4]))
        assert await asyncio.to_thread(started.wait, 10)
        for _ in range(2):
            call.cancel()
            await asyncio.sleep(0.01)
            assert not call.done(), "its blocks would be given away"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert worked == [[3, 4]]

    asyncio.run(test())


def test_an_error_of_the_work_is_the_callers() -> None:
    def work(blocks: list[int]) -> None:
        raise RuntimeError(f"no copy of {blocks}")

    with pytest.raises(RuntimeError, match=r"no copy of \[1\]"):
        asyncio.run(to_the_end(work, [1]))
