"""Who is killed when memory runs out, and what is said about it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blitzd.node import oom
from blitzd.node.oom import WORKER_SCORE_ADJ, OomKills
from blitzd.node.worker_process import WorkerProcess

LIMIT = 64 << 20
EATER = "import os\nwhile True: globals().setdefault('eaten', []).append(os.urandom(1 << 20))"


async def ended(argv: list[str], directory: Path, kill: signal.Signals | None = None) -> str:
    exits: asyncio.Queue[str] = asyncio.Queue()
    process = WorkerProcess.start(argv, directory / "log", exits.put_nowait)
    if kill is not None:
        process.signal(kill)
    async with asyncio.timeout(30):
        return await exits.get()


def oom_score_adj(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_a_worker_is_the_first_to_go(tmp_path: Path) -> None:
    async def look() -> int:
        exits: asyncio.Queue[str] = asyncio.Queue()
        process = WorkerProcess.start(["sleep", "60"], tmp_path / "log", exits.put_nowait)
        score = oom_score_adj(process.pid)
        process.signal(signal.SIGKILL)
        await exits.get()
        return score

    assert asyncio.run(look()) == WORKER_SCORE_ADJ > oom_score_adj(os.getpid())


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup of LIMIT bytes, below our own."""
    parent = oom._counter(os.getpid())
    group = parent.parent / f"blitzd-test-{os.getpid()}" if parent else None
    try:
        if group is None:
            raise OSError("no memory cgroup")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"memory cgroups cannot be made here: {error}")
    v1 = group / "memory.limit_in_bytes"
    limit = v1 if v1.exists() else group / "memory.max"
    if not limit.exists():
        group.rmdir()
        pytest.skip("the memory controller is not on in our cgroup")
    limit.write_text(str(LIMIT))
    yield group
    group.rmdir()


def test_a_worker_that_the_kernel_killed_is_told_from_one_that_somebody_killed(
    limited: Path,
) -> None:
    enter = ["sh", "-c", f'echo $$ > {limited}/cgroup.procs; exec "$@"', "enter"]
    eater = f"import sys; print(flush=True); sys.stdin.readline()\n{EATER}"

    def start(program: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        child = subprocess.Popen([*enter, sys.executable, "-c", program], stdin=pipe, stdout=pipe)
        assert child.stdout is not None
        child.stdout.readline()  # it is in the cgroup
        return child

    children = [start(eater), start("import time; print(flush=True); time.sleep(60)")]

    async def starve_one_and_kill_the_other() -> list[str]:
        exits: asyncio.Queue[str] = asyncio.Queue()
        found = []
        for child in children:
            WorkerProcess(child.pid, exits.put_nowait)
        for child in children:
            assert child.stdin is not None
            child.stdin.close()  # which lets the first go on
            if child is children[1]:
                child.kill()
            async with asyncio.timeout(60):
                found.append(await exits.get())
            child.returncode = 0
        return found

    first, second = asyncio.run(starve_one_and_kill_the_other())
    assert first == f"killed by SIGKILL (out of memory: {oom_file(limited)} counts another kill)"
    assert second == "killed by SIGKILL", "the one kill that was counted has been told"


def oom_file(group: Path) -> Path:
    v1 = group / "memory.oom_control"
    return v1 if v1.exists() else group / "memory.events"


def test_a_kill_that_no_counter_knows_was_somebodys(tmp_path: Path) -> None:
    if OomKills(os.getpid())._read() is None:
        pytest.skip("no memory cgroup counts kills here")

    async def other() -> str:
        exits: asyncio.Queue[str] = asyncio.Queue()
        process = WorkerProcess.start(["sleep", "60"], tmp_path / "log", exits.put_nowait)
        os.kill(process.pid, signal.SIGKILL)
        return await exits.get()

    assert asyncio.run(other()) == "killed by SIGKILL"


def test_without_a_counter_it_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "CGROUPS", tmp_path)
    assert OomKills(os.getpid()).verdict() == "possibly out of memory"


@pytest.mark.parametrize(
    ("argv", "kill", "how"),
    [
        (["sh", "-c", "exit 3"], None, "exited with status 3"),
        # Ours: the reason is told by who did it.
        (["sleep", "60"], signal.SIGKILL, "killed by SIGKILL"),
        (["sleep", "60"], signal.SIGTERM, "killed by SIGTERM"),
    ],
)
def test_other_deaths_are_said_as_they_are(
    tmp_path: Path, argv: list[str], kill: signal.Signals | None, how: str
) -> None:
    assert asyncio.run(ended(argv, tmp_path, kill)) == how
