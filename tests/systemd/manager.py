"""A real systemd as PID 1 of namespaces of its own, with no units but those that a test gives,
dbus and polkit.

It takes root, for the namespaces and the cgroup. The network is the machine's; what systemd
and the daemon write (/etc, /run, /opt, /var/lib, /var/cache) is not.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "systemd"
STOCK = Path("/lib/systemd/system")
SYSTEMD = Path("/lib/systemd/systemd")
CGROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))

BOOT = """
set -e
mount --make-rprivate /
base=$1 python=$2
mount -t tmpfs tmpfs $base/upper
mkdir $base/upper/etc $base/upper/work $base/python
# The interpreter may lie where only root gets through.
mount --bind $python $base/python
case $python in /root/*) mount -t tmpfs -o mode=755 tmpfs /root ;; esac
mkdir -p $python
mount --bind $base/python $python
mount -t overlay overlay -o lowerdir=/etc,upperdir=$base/upper/etc,workdir=$base/upper/work /etc
for directory in /opt /run /var/lib /var/cache; do mount -t tmpfs -o mode=755 tmpfs $directory; done
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cp -r $base/files/. /
systemd-sysusers $base/blitzd.sysusers
export container=blitzd-tests SYSTEMD_UNIT_PATH=/etc/blitzd-units SYSTEMD_LOG_TARGET=console
exec /lib/systemd/systemd --system --unit=multi-user.target
"""

BLITZD = f"""#!/bin/sh
export PYTHONPATH={ROOT}
exec {sys.executable} -m blitzd "$@"
"""

LOGGED = "[Service]\nStandardOutput=append:{base}/log\nStandardError=append:{base}/log\n"


HIDDEN = ("/tmp", "/var/tmp", "/home", "/root", "/run/user")
"""By PrivateTmp and ProtectHome."""


def missing() -> str:
    """Why there cannot be one here; empty when there can."""
    if not SYSTEMD.exists():
        return "systemd is not installed"
    if os.geteuid():
        return "a systemd of one's own takes root"
    if _cgroup_parent() is None:
        return "no cgroup v2 hierarchy that can be written"
    tree = Path(__file__).resolve()
    if any(tree.is_relative_to(hidden) for hidden in HIDDEN):
        return f"the sandbox of the units hides {tree.parents[2]}"
    probe = ["unshare", "--pid", "--fork", "--mount", "--cgroup", "--mount-proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=10, check=False)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


def _cgroup_parent() -> Path | None:
    for path in CGROUPS:
        if (path / "cgroup.procs").exists() and os.access(path, os.W_OK):
            return path
    return None


class Manager:
    def __init__(self, toml: str, drop_ins: dict[str, str]) -> None:
        """`toml` is /etc/blitzd/blitzd.toml; `drop_ins` are by unit."""
        self.base = Path(tempfile.mkdtemp(prefix="blitzd-systemd-"))
        self.base.chmod(0o755)
        (self.base / "upper").mkdir()
        shutil.copy(UNITS / "blitzd.sysusers", self.base)
        files = self.base / "files"
        self._units = files / "etc/blitzd-units"
        self._units.mkdir(parents=True)
        self._copy_units(drop_ins)
        for path, text in (
            ("opt/blitzd/bin/blitzd", BLITZD),
            ("etc/blitzd/blitzd.toml", toml),
            ("etc/polkit-1/rules.d/50-blitzd.rules", (UNITS / "50-blitzd.rules").read_text()),
            ("var/lib/polkit-1/.keep", ""),
        ):
            (files / path).parent.mkdir(parents=True, exist_ok=True)
            (files / path).write_text(text)
        (files / "opt/blitzd/bin/blitzd").chmod(0o755)
        self._process: subprocess.Popen[bytes] | None = None
        self._cgroup: Path | None = None

    def _copy_units(self, drop_ins: dict[str, str]) -> None:
        for unit in ("blitzd.service", "blitzd-worker@.service"):
            shutil.copy(UNITS / unit, self._units)
        for stock in ("dbus.socket", "dbus.service", "polkit.service"):
            shutil.copy(STOCK / stock, self._units)
        for target in ("sysinit", "basic", "sockets", "shutdown", "multi-user", "network-online"):
            text = f"[Unit]\nDescription={target}\nDefaultDependencies=no\n"
            if target == "multi-user":
                text += "Requires=dbus.socket polkit.service\nAfter=dbus.socket polkit.service\n"
            (self._units / f"{target}.target").write_text(text)
        logged = LOGGED.format(base=self.base)
        for unit in ("blitzd.service", "blitzd-worker@.service"):
            directory = self._units / f"{unit}.d"
            directory.mkdir()
            (directory / "test.conf").write_text(logged + drop_ins.get(unit, ""))

    def start(self) -> "Manager":
        parent = _cgroup_parent()
        assert parent is not None
        self._cgroup = parent / self.base.name
        self._cgroup.mkdir()
        (self.base / "boot.sh").write_text(BOOT)
        procs = self._cgroup / "cgroup.procs"
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "--ipc"]
        unshare += ["--cgroup", "--mount-proc"]
        boot = ["sh", str(self.base / "boot.sh"), str(self.base), sys.base_prefix]
        enter = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "enter"]
        with (self.base / "boot.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*enter, *unshare, *boot], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 20
        while self.systemctl("is-system-running").stdout.strip() not in ("running", "degraded"):
            assert self._process.poll() is None, (self.base / "boot.log").read_text()
            assert time.monotonic() < deadline, (self.base / "boot.log").read_text()
            time.sleep(0.1)
        return self

    def run(self, *argv: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command in there, as root."""
        enter = ["nsenter", "--target", str(self._pid()), "--mount", "--pid", "--ipc", "--cgroup"]
        return subprocess.run(
            [*enter, *argv], capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def _pid(self) -> int:
        """systemd's, out here."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return int((children.read_text().split() or ["0"])[0])

    def systemctl(self, *args: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", "--no-pager", *args, timeout_s=timeout_s)

    def show(self, unit: str, name: str) -> str:
        return self.systemctl("show", unit, "--property", name, "--value").stdout.strip()

    @property
    def log(self) -> str:
        path = self.base / "log"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)  # --kill-child takes all the rest along
            self._process.wait(20)
        if self._cgroup is not None:
            deadline = time.monotonic() + 10
            while (self._cgroup / "cgroup.kill").exists() and time.monotonic() < deadline:
                try:
                    for directory in sorted(self._cgroup.rglob("*/"), reverse=True):
                        directory.rmdir()
                    self._cgroup.rmdir()
                except OSError:
                    time.sleep(0.05)
        shutil.rmtree(self.base, ignore_errors=True)
