"""Whether the kernel killed a process for lack of memory. Only its counters say so: the
signal is the same as anybody's."""

import os
from pathlib import Path

POSSIBLY = "possibly out of memory"

CGROUPS = Path("/sys/fs/cgroup")

WORKER_SCORE_ADJ = 500
"""Of 1000. When memory runs out a worker goes before the daemon: it is replaced, its requests
are known. Half, so that a small worker still outlives a process that took everything."""

_told: dict[Path, int] = {}
"""Kills that a counter had when we first saw it, and those since that were told."""


class OomKills:
    """The counter of the memory cgroup that a process is in now."""

    def __init__(self, pid: int) -> None:
        self.file = _counter(pid)
        if self.file is not None and (count := self._read()) is not None:
            _told.setdefault(self.file, count)

    @property
    def readable(self) -> bool:
        return self._read() is not None

    def verdict(self) -> str:
        """What to say of a SIGKILL that came since."""
        count = self._read()
        if count is None or self.file is None:
            return POSSIBLY
        if count <= _told.setdefault(self.file, count):
            return ""
        # One kill is one death, when workers share a cgroup.
        _told[self.file] += 1
        return f"out of memory: {self.file} counts another kill"

    def _read(self) -> int | None:
        if self.file is None:
            return None
        try:
            lines = dict(line.split() for line in self.file.read_text().splitlines())
            return int(lines["oom_kill"])
        except (OSError, ValueError, KeyError):
            return None


def _counter(pid: int) -> Path | None:
    """memory.oom_control of cgroup v1, memory.events of v2: whichever the process has.

    A unit's cgroup goes with its process, and the counter with it; of v2 the parent's counts
    what is below it.
    """
    group = _memory_group(pid)
    if group is None:
        return None
    path, version = group
    if version == 1:
        return path / "memory.oom_control"
    if group != _memory_group(os.getpid()):
        path = path.parent
    return path / "memory.events"


def _memory_group(pid: int) -> tuple[Path, int] | None:
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return CGROUPS / "memory" / path.lstrip("/"), 1
        if not controllers:
            found = CGROUPS / path.lstrip("/"), 2
    return found


def yield_memory_first(pid: int) -> None:
    """Raises OSError."""
    Path(f"/proc/{pid}/oom_score_adj").write_text(str(WORKER_SCORE_ADJ))
