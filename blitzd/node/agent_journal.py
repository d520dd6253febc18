"""What an agent must know again after it was killed: how often it has started, and which
workers it has running."""

import fcntl
import os
from pathlib import Path

import msgspec


class Known(msgspec.Struct, frozen=True):
    """A worker whose process was started and answered."""

    replica: str
    epoch: int
    pid: int
    endpoint: str


class _Content(msgspec.Struct):
    epoch: int = 0
    lease_ms: int = 0
    workers: list[Known] = []


class AgentJournal:
    """A file that is replaced as a whole. One agent has it at a time."""

    def __init__(self, state_dir: Path) -> None:
        """A new start. Raises OSError; ValueError when another agent has it or it is damaged."""
        state_dir.mkdir(parents=True, exist_ok=True)
        self._path = state_dir / "agent.json"
        self._lock = (state_dir / "agent.lock").open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(f"{state_dir} is in use by another agent") from error
        try:
            text = self._path.read_bytes() if self._path.exists() else b"{}"
            self._content = msgspec.json.decode(text, type=_Content)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self._path} is damaged ({error})") from error
        self._content.epoch += 1
        self._write()

    @property
    def epoch(self) -> int:
        """Of this start; never the same twice."""
        return self._content.epoch

    @property
    def lease_s(self) -> float:
        """As the controller last said."""
        return self._content.lease_ms / 1e3

    @property
    def workers(self) -> list[Known]:
        return list(self._content.workers)

    def promise(self, lease_ms: int) -> None:
        if lease_ms != self._content.lease_ms:
            self._content.lease_ms = lease_ms
            self._write()

    def add(self, worker: Known) -> None:
        self._content.workers.append(worker)
        self._write()

    def remove(self, replica: str, epoch: int) -> None:
        kept = [w for w in self._content.workers if (w.replica, w.epoch) != (replica, epoch)]
        if len(kept) < len(self._content.workers):
            self._content.workers = kept
            self._write()

    def _write(self) -> None:
        """It must be there when a power cut has ended this process, too: an epoch that came
        back would be taken for the present one."""
        fresh = self._path.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.encode(self._content))
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def close(self) -> None:
        self._lock.close()
