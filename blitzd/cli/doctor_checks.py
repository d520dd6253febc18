"""What `blitzd doctor` looks at. Each check yields what it found, most of them one thing."""

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from blitzd.cli.settings import Settings
from blitzd.engine import catalogue
from blitzd.engine.device import devices_of
from blitzd.engine.worker import SOCKET_BYTES
from blitzd.events import LogError
from blitzd.events.segment import log_directory
from blitzd.events.verify import verify
from blitzd.fsm import IllegalEvent, IllegalTransition
from blitzd.node.oom import OomKills
from blitzd.node.paths import default_state_dir, runtime_dir
from blitzd.node.restore import restore
from blitzd.node.worker_units import unit_of

FILES_LEAST = 4096
"""Descriptors: a connection of a client takes one, a worker ten."""
FREE_LEAST_MIB = 1024
IMPORT_S = 60.0
SYSTEMCTL_S = 10.0


class Finding(msgspec.Struct, frozen=True):
    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    settings: Settings
    state_dir: Path

    @classmethod
    def of(cls, settings: Settings) -> "Machine":
        given = settings.node.state_dir
        return cls(settings, Path(given).expanduser() if given else default_state_dir())

    @property
    def kv_mib(self) -> int:
        counts = self.settings.replicas
        return self.settings.engine.kv_mib * (counts.prefill + counts.decode)


Check = Callable[[Machine], Iterator[Finding]]


def kernel(machine: Machine) -> Iterator[Finding]:
    release = os.uname().release
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        fix = "Linux 5.3 or later; in a container, a seccomp profile that allows pidfd_open"
        yield Finding("kernel", "fail", f"{release}: no pidfd ({error.strerror})", fix)
        return
    yield Finding("kernel", "ok", f"{release}, pidfd")


def memory(machine: Machine) -> Iterator[Finding]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    mib = {name: int(rest.split()[0]) >> 10 for name, _, rest in (x.partition(":") for x in lines)}
    found = (
        f"{machine.kv_mib} MiB of KV cache beside the weights;"
        f" {mib['MemAvailable']} of {mib['MemTotal']} MiB available"
    )
    fix = "a smaller engine.kv_mib, or fewer replicas"
    if machine.kv_mib > mib["MemTotal"]:
        yield Finding("memory", "fail", found, fix)
    elif machine.kv_mib > mib["MemAvailable"]:
        yield Finding("memory", "warn", found, fix)
    else:
        yield Finding("memory", "ok", found)


def memfd(machine: Machine) -> Iterator[Finding]:
    """Of the size of a KV cache; its pages are not touched."""
    size = machine.settings.engine.kv_mib << 20
    try:
        fd = os.memfd_create("blitzd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        fix = "a seccomp profile that allows memfd_create"
        yield Finding("memfd", "fail", f"cannot be made: {error.strerror}", fix)
        return
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        fix = "a larger file size limit (ulimit -f, LimitFSIZE=), or a smaller engine.kv_mib"
        yield Finding("memfd", "fail", f"{size >> 20} MiB: {error.strerror}", fix)
        return
    finally:
        os.close(fd)
    yield Finding("memfd", "ok", f"{size >> 20} MiB, sealed")


def files(machine: Machine) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    status: Literal["ok", "warn"] = "ok" if soft >= FILES_LEAST else "warn"
    fix = f"ulimit -n {min(hard, 65536)}, or LimitNOFILE= in the unit" if status == "warn" else ""
    yield Finding("files", status, f"{soft} descriptors a process", fix)


def memlock(machine: Machine) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 20} MiB"
    pins = machine.settings.engine.device != "cpu" or Path("/dev/infiniband").is_dir()
    if pins and soft != resource.RLIM_INFINITY:
        fix = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the worker's unit"
        yield Finding("memlock", "warn", f"{shown}; GPUs and RDMA devices pin what they move", fix)
    else:
        yield Finding("memlock", "ok", shown)


def imports(machine: Machine) -> Iterator[Finding]:
    """In processes of their own, since a library may take its process down."""
    ucx = (
        "from blitzd.fabric.ucx_env import binding; binding()\nimport ucxx; print(ucxx.__version__)"
    )
    for name, program, fix in (
        ("torch", "import torch; print(torch.__version__)", "pip install torch"),
        ("ucx", ucx, "pip install ucxx-cu12==0.52.0"),
    ):
        argv = [sys.executable, "-c", program]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=IMPORT_S, check=False
            )
        except subprocess.TimeoutExpired:
            yield Finding(name, "fail", f"not imported within {IMPORT_S:g} s", fix)
            continue
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            yield Finding(name, "fail", reason, fix)
        else:
            yield Finding(name, "ok", done.stdout.strip())


def devices(machine: Machine) -> Iterator[Finding]:
    wanted = machine.settings.engine.device
    try:
        yield Finding("devices", "ok", f"{wanted}: {', '.join(devices_of(wanted))}")
    except ValueError as error:
        fix = "the driver and pip install 'blitzd[cuda]'; or engine.device = 'auto'"
        yield Finding("devices", "fail", str(error), fix)


def ports(machine: Machine) -> Iterator[Finding]:
    http, admin = machine.settings.http, machine.settings.admin
    for key, host, port in (
        ("http.port", http.host, http.port),
        ("admin.port", "127.0.0.1", admin.port),
    ):
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            holder = _log_holder(machine)
            if holder and error.errno == errno.EADDRINUSE:
                found = f"{host}:{port} is taken, and process {holder} serves {machine.state_dir}"
                yield Finding(key, "warn", found, "nothing, if that is the daemon you mean")
                continue
            yield Finding(key, "fail", f"{host}:{port}: {error.strerror}", f"another {key}")
        else:
            yield Finding(key, "ok", f"{host}:{port} is free")


def _log_holder(machine: Machine) -> str:
    """The pid of the daemon that has the log open; empty when none has."""
    path = log_directory(machine.state_dir) / "lock"
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read(64).decode(errors="replace")
    return ""


def state(machine: Machine) -> Iterator[Finding]:
    yield from _writable("state_dir", machine.state_dir, "node.state_dir, or its owner")
    if not (machine.state_dir / "log").is_dir():
        yield Finding("log", "ok", "none yet")
        return
    try:
        report = verify(machine.state_dir)
        if report.ok:
            restore(machine.state_dir)
    except (LogError, IllegalEvent, IllegalTransition, OSError) as error:
        yield Finding("log", "fail", str(error), f"blitzd log verify {machine.state_dir}")
        return
    found = f"{report.records} records in {report.segments} segments, {report.bytes >> 20} MiB"
    if report.ok:
        yield Finding("log", "ok", found)
    else:
        problem = f"{found}; {report.problems[0].reason}"
        yield Finding("log", "fail", problem, f"blitzd log verify {machine.state_dir}")


def runtime(machine: Machine) -> Iterator[Finding]:
    try:
        path = runtime_dir(machine.state_dir)
    except OSError as error:
        fix = "$XDG_RUNTIME_DIR, a directory that is yours"
        yield Finding("runtime_dir", "fail", str(error), fix)
        return
    with contextlib.suppress(OSError):
        path.rmdir()  # it is made with the daemon, and empty only when none runs
    longest = len(os.fsencode(path / ".r99-99999.kv.sock"))
    if longest > SOCKET_BYTES:
        fix = f"a shorter $XDG_RUNTIME_DIR: unix sockets take {SOCKET_BYTES} bytes"
        yield Finding("runtime_dir", "fail", f"{path}: sockets of {longest} bytes", fix)
    else:
        yield Finding("runtime_dir", "ok", str(path))


def model(machine: Machine) -> Iterator[Finding]:
    yield from _writable("cache", catalogue.cache_root(), "$XDG_CACHE_HOME, or its owner")
    name = machine.settings.model.name
    entry = catalogue.CATALOGUE.get(name)
    try:
        yield Finding("model", "ok", str(catalogue.resolve(name)))
    except FileNotFoundError as error:
        if entry is not None:
            mib = entry.bytes >> 20
            yield Finding("model", "warn", f"{name} is fetched at the first start ({mib} MiB)")
        else:
            yield Finding("model", "fail", str(error), "model.name")
    except (OSError, ValueError) as error:
        yield Finding("model", "fail", str(error), "model.name")


def _writable(name: str, path: Path, fix: str) -> Iterator[Finding]:
    there = next(one for one in (path, *path.parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        yield Finding(name, "fail", f"{there} cannot be written by uid {os.geteuid()}", fix)
        return
    free = shutil.disk_usage(there).free >> 20
    status: Literal["ok", "warn"] = "ok" if free >= FREE_LEAST_MIB else "warn"
    yield Finding(name, status, f"{path}, {free} MiB free", "make room" if status == "warn" else "")


def manager(machine: Machine) -> Iterator[Finding]:
    """systemd: needed for node.spawn = "systemd", and a convenience otherwise."""
    wanted = machine.settings.node.spawn == "systemd"
    bad: Literal["warn", "fail"] = "fail" if wanted else "warn"
    if not Path("/run/systemd/system").is_dir():
        fix = "node.spawn = 'process'" if wanted else ""
        found = "not what this machine was booted with"
        yield Finding("systemd", bad if wanted else "ok", found, fix)
        return
    try:
        argv = ["systemctl", "--no-pager", "cat", unit_of("r0-1")]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("systemd", bad, f"systemctl: {error}", "is the manager well?")
        return
    if done.returncode:
        fix = "docs/systemd.md: installation"
        yield Finding("systemd", bad, f"{unit_of('')} is not installed", fix)
    else:
        yield Finding("systemd", "ok", "the units are installed")


def oom(machine: Machine) -> Iterator[Finding]:
    counter = OomKills(os.getpid())
    found = f"kills are counted in {counter.file}" if counter.readable else "kills are not counted"
    yield Finding("out of memory", "ok" if counter.readable else "warn", found)


CHECKS: tuple[Check, ...] = (
    kernel, memory, memfd, files, memlock, imports, devices, ports, state, runtime, model,
    manager, oom,
)  # fmt: skip
