"""Tasks that must outlive the handler that started them, and are awaited at shutdown."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class TaskOwner:
    """Holds tasks until they end. A handler is cancelled when its client leaves; what it
    owes the node then (a cancellation) must not be cancelled with it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.adopt(asyncio.get_running_loop().create_task(work))

    def adopt(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, timeout_s: float) -> None:
        """Waits for all tasks, also for those that they start while ending; cancels what
        is left after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._tasks and (left := deadline - loop.time()) > 0:
            await asyncio.wait(self._tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            log.warning("cut off at shutdown: %s", task.get_name())
            task.cancel()
