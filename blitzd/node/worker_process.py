"""A worker's process as the daemon sees it: start, notice its death at once, end it.

Workers are session leaders and outlive the daemon, so a worker may be a child or, after a
restart of the daemon, somebody else's. A pidfd tells of the death of both, within
milliseconds and without polling.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path


class WorkerProcess:
    """`on_exit` is called once, in the event loop, when the process has died."""

    def __init__(self, pid: int, on_exit: Callable[[str], None]) -> None:
        """Raises ProcessLookupError when there is no such process."""
        self.pid = pid
        self._on_exit = on_exit
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
        worker = cls(process.pid, on_exit)
        # Reaped in `_died`; Popen must not warn about a child that it still thinks runs.
        process.returncode = 0
        return worker

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        how = "exited"
        with contextlib.suppress(ChildProcessError):
            result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
            if result is not None:
                how = _describe(result)
        os.close(self._pidfd)
        self._exited.set()
        self._on_exit(how)

    @property
    def alive(self) -> bool:
        return not self._exited.is_set()

    def signal(self, number: signal.Signals) -> None:
        """Through the pidfd, so that a reused pid is never hit."""
        if self.alive:
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


def _describe(result: os.waitid_result) -> str:
    if result.si_code == os.CLD_EXITED:
        return f"exited with status {result.si_status}"
    return f"killed by {signal.Signals(result.si_status).name}"
