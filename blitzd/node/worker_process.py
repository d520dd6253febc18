"""A worker's process as the daemon sees it: notice its death at once, say how it died, end it.

Workers are session leaders and outlive the daemon, so a worker may be a child or, after a
restart of the daemon or as a unit, somebody else's. A pidfd tells of the death of all of them,
within milliseconds and without polling.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

from blitzd.node.oom import POSSIBLY, OomKills, yield_memory_first
from blitzd.node.pidfd import exit_code

Cause = Callable[[], Awaitable[str]]
"""How a process that is not our child died, for kernels that do not say; asked after it."""


class WorkerProcess:
    """`on_exit` is called once, in the event loop, when the process has died."""

    def __init__(
        self, pid: int, on_exit: Callable[[str], None], cause: Cause | None = None
    ) -> None:
        """Raises ProcessLookupError when there is no such process."""
        self.pid = pid
        self._on_exit = on_exit
        self._cause = cause
        self._oom = OomKills(pid)
        self._killed = False
        self._asking: asyncio.Task[None] | None = None
        self._pidfd = os.pidfd_open(pid)
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    @classmethod
    def start(
        cls, argv: list[str], log_path: Path, on_exit: Callable[[str], None]
    ) -> "WorkerProcess":
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log_file:
            # The daemon's death must not be the worker's: own session, no shared pipes.
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                start_new_session=True,
            )
        with contextlib.suppress(OSError):  # it has ended already
            yield_memory_first(process.pid)
        worker = cls(process.pid, on_exit)
        # Reaped in `_died`; Popen must not warn about a child that it still thinks runs.
        process.returncode = 0
        return worker

    def _died(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        self._exited.set()
        try:
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        except ChildProcessError:
            self._asking = loop.create_task(self._ask())
            return
        os.close(self._pidfd)
        if result is not None:
            exited = result.si_code == os.CLD_EXITED
            self._on_exit(self._describe(result.si_status if exited else -result.si_status))

    async def _ask(self) -> None:
        """Of one that is not our child."""
        try:
            code = await exit_code(self._pidfd)
        finally:
            os.close(self._pidfd)
        if code is not None:
            self._on_exit(self._describe(code))
        elif self._cause is not None:
            self._on_exit(await self._cause())
        else:
            self._on_exit(f"ended; an earlier daemon started it{self._out_of_memory()}")

    def _describe(self, code: int) -> str:
        if code >= 0:
            return f"exited with status {code}"
        how = f"killed by {signal.Signals(-code).name}"
        return how + self._out_of_memory() if code == -signal.SIGKILL else how

    def _out_of_memory(self) -> str:
        """Even when we have killed it: what the kernel kills breaks its streams first, and for
        that we kill."""
        why = self._oom.verdict()
        return f" ({why})" if why and not (self._killed and why == POSSIBLY) else ""

    @property
    def alive(self) -> bool:
        return not self._exited.is_set()

    def signal(self, number: signal.Signals) -> None:
        """Through the pidfd, so that a reused pid is never hit."""
        if self.alive:
            self._killed |= number is signal.SIGKILL
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL when that was not enough within `grace_s`."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._exited.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._exited.wait()
