"""Starts workers on this machine, and finds those that an earlier daemon left."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from blitzd.node import worker_units
from blitzd.node.config import NodeConfig
from blitzd.node.worker_process import Cause, WorkerProcess

NotStarted = (worker_units.UnitFailed, OSError, ValueError)


class Starter:
    def __init__(self, config: NodeConfig, runtime_dir: Path) -> None:
        self._config = config
        self._runtime_dir = runtime_dir

    def socket(self, replica: str, epoch: int) -> Path:
        return self._runtime_dir / f"{replica}-{epoch}.sock"

    def options(self, replica: str, epoch: int) -> list[str]:
        """Of `blitzd worker`."""
        config = self._config
        afar = []
        if config.address:
            tls = config.tls
            afar = ["--host", config.address]
            if tls.ca:
                afar += ["--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca]
        device = config.network_device_of(replica)
        if device:
            afar += ["--network-device", device]
        return [
            *("--id", replica, "--epoch", str(epoch)),
            *("--socket", str(self.socket(replica, epoch))),
            *("--device", config.device_of(replica)),
            *("--weights", config.weights),
            *("--threads", str(config.worker_threads)),
            *("--max-batch-tokens", str(config.max_batch_tokens)),
            *("--max-batch-size", str(config.max_batch_size)),
            *("--pace-layer-ms", str(config.pace_layer_ms)),
            *("--live-policy", config.live_policy),
            *("--orphan-timeout", str(config.orphan_timeout_s)),
            *("--model", str(config.model_dir)),
            *afar,
        ]

    async def start(
        self, replica: str, epoch: int, on_exit: Callable[[str], None]
    ) -> WorkerProcess:
        """Raises one of `NotStarted`."""
        name, options = f"{replica}-{epoch}", self.options(replica, epoch)
        if self._config.spawn == "systemd":
            pid = await worker_units.start(name, options)
            return WorkerProcess(pid, on_exit, self._cause(name))
        argv = [sys.executable, "-m", "blitzd", "worker", *options]
        log_path = self._config.state_dir / "workers" / f"{name}.log"
        return WorkerProcess.start(argv, log_path, on_exit)

    def adopt(
        self, replica: str, epoch: int, pid: int, on_exit: Callable[[str], None]
    ) -> WorkerProcess | None:
        """A worker of an earlier daemon; None: there is no such process."""
        try:
            return WorkerProcess(pid, on_exit, self._cause(f"{replica}-{epoch}"))
        except ProcessLookupError:
            return None

    def is_worker(self, replica: str, epoch: int, pid: int) -> bool:
        """And not a stranger that got its number."""
        argv = _argv(pid)
        return "worker" in argv and all(
            argv[argv.index(name) + 1] == value if name in argv[:-1] else False
            for name, value in (("--id", replica), ("--epoch", str(epoch)))
        )

    def started_as_now(self, replica: str, epoch: int, pid: int) -> bool:
        options, argv = self.options(replica, epoch), _argv(pid)
        return argv[-len(options) :] == options

    def _cause(self, name: str) -> Cause | None:
        """A unit is no child of ours; only the manager knows how it died."""
        by_systemd = self._config.spawn == "systemd"
        return partial(worker_units.cause, name) if by_systemd else None

    def clear(self, replica: str, epoch: int) -> None:
        """A worker that was killed leaves its sockets: its own and that of its KV arena."""
        for socket in self._runtime_dir.glob(f"{replica}-{epoch}.*sock"):
            socket.unlink(missing_ok=True)

    async def forget(self, replica: str, epoch: int) -> None:
        """Of one whose process is gone: what the service manager keeps."""
        if self._config.spawn == "systemd":
            await worker_units.forget(f"{replica}-{epoch}")


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    except (OSError, UnicodeDecodeError):
        return []
