"""The generations behind one HTTP request: started together, read as one, always freed."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from blitzd.http.limits import Limits
from blitzd.http.tasks import TaskOwner
from blitzd.node.face import Delta, GenerateRequest, Generation, GenerationFailed, NodeFace

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    node: NodeFace, requests: Sequence[GenerateRequest], owner: TaskOwner, limits: Limits
) -> AsyncIterator[list[Generation]]:
    """Starts one generation a request; on the way out cancels those that still run.

    Acceptance and release are tasks of `owner`: a client that leaves cancels its handler
    at any await, also between the node's acceptance and our hearing of it.
    Raises RequestRefused when the node refuses any of them.
    """
    started: list[Generation] = []
    leaving = False

    async def start() -> None:
        for request in requests:
            if leaving:
                return
            started.append(await node.generate(request))

    starting = owner.start(start())
    try:
        try:
            async with asyncio.timeout(limits.stall_s):
                await asyncio.shield(starting)
        except TimeoutError:
            raise _stalled(limits) from None
        yield started
    finally:
        leaving = True
        await asyncio.shield(owner.start(_release(starting, started, limits.release_s)))


async def _release(
    starting: asyncio.Task[None], started: list[Generation], timeout_s: float
) -> None:
    """Waits for an acceptance under way, then cancels everything (a no-op after the end)."""
    await asyncio.wait([starting], timeout=timeout_s)
    if not starting.done():
        log.error("the node did not answer a request within %s s of its cancellation", timeout_s)
        starting.cancel()
    elif not starting.cancelled():
        starting.exception()  # seen: the handler has answered it, or its client is gone
    cancellations = [asyncio.wait_for(generation.cancel(), timeout_s) for generation in started]
    for generation, result in zip(
        started, await asyncio.gather(*cancellations, return_exceptions=True), strict=True
    ):
        if isinstance(result, BaseException):
            log.error("request %s was not cancelled", generation.request_id, exc_info=result)


def deltas(
    generations: Sequence[Generation], limits: Limits
) -> AsyncGenerator[tuple[int, Delta], None]:
    """(choice, delta) as they come, until every choice has finished.

    Raises GenerationFailed, also when a choice ends without a finish reason or nothing
    comes for `limits.stall_s`.
    """
    # One choice is the usual case, and goes without a task for each delta.
    return (
        _interleaved(generations, limits) if len(generations) > 1 else _one(generations[0], limits)
    )


async def _one(generation: Generation, limits: Limits) -> AsyncGenerator[tuple[int, Delta], None]:
    iterator = aiter(generation)
    while True:
        try:
            async with asyncio.timeout(limits.stall_s):
                delta = await anext(iterator)
        except StopAsyncIteration:
            raise _unfinished() from None
        except TimeoutError:
            raise _stalled(limits) from None
        yield 0, delta
        if delta.finish is not None:
            return


async def _interleaved(
    generations: Sequence[Generation], limits: Limits
) -> AsyncGenerator[tuple[int, Delta], None]:
    iterators = [aiter(generation) for generation in generations]

    def next_of(index: int) -> asyncio.Task[Delta | None]:
        async def step() -> Delta | None:
            return await anext(iterators[index], None)

        return asyncio.get_running_loop().create_task(step())

    waiting = {next_of(index): index for index in range(len(iterators))}
    try:
        while waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=limits.stall_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise _stalled(limits)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                delta = task.result()
                if delta is None:
                    raise _unfinished()
                if delta.finish is None:
                    waiting[next_of(index)] = index
                yield index, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _unfinished() -> GenerationFailed:
    return GenerationFailed("it ended without a finish reason", code="incomplete")


def _stalled(limits: Limits) -> GenerationFailed:
    return GenerationFailed(
        f"nothing came for {limits.stall_s:g} s; it was cancelled", code="generation_stalled"
    )
