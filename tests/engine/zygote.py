"""Forks workers from a process that has imported everything, so that one starts in
milliseconds. What it forks is the real worker: its own process, session, loop and sockets.

Lines of JSON on stdin, `{"id", "epoch", "socket", ...}`; the pid of each on stdout.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import blitzd.engine.replica
from blitzd.engine.live_stepper import LayerStep, LiveStepper
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.stepper import Result, Step
from blitzd.engine.worker import WorkerOptions, run
from blitzd.fabric import Identity
from blitzd.fabric.ucx_env import binding
from blitzd.proto.blitzd.engine import v1 as pb
from tests.hosts.netns import move_to


def become_worker(order: dict[str, object], log: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(0)
    os.close(1)
    if order.pop("staged", False):
        # KV apart from the buffer that peers see, as on a device.
        blitzd.engine.replica.model_device = lambda *_: torch.device("cpu")
    if steps := order.pop("steps", ""):
        record_steps(Path(str(steps)))
    if namespace := order.pop("namespace", ""):
        move_to(str(namespace))
    replica = ReplicaOptions(**order.pop("replica", {}))  # type: ignore[arg-type]
    options = WorkerOptions(
        identity=Identity.parse(str(order.pop("identity"))),
        socket=Path(str(order.pop("socket"))),
        replica=replica,
        **order,  # type: ignore[arg-type]
    )
    os._exit(run(options))


def record_steps(path: Path) -> None:
    """A line of JSON for each request in each step: [id, first layer, layer behind the last, begin,
    end], in ns of the monotonic clock."""
    lines = path.open("a", buffering=1)
    finish = LiveStepper.finish

    def recorded(self: LiveStepper, step: Step, result: Result | Exception) -> pb.StepReport:
        ran = [(chunk.sequence.id, 0, self.live.layers) for chunk in step.plan.chunks]
        if isinstance(step, LayerStep):
            ran = [(step.live.one.id, step.live.one.done, step.live.last)]
        now = time.monotonic_ns()
        lines.writelines(json.dumps([*one, step.began_ns, now]) + "\n" for one in ran)
        return finish(self, step, result)

    LiveStepper.finish = recorded  # type: ignore[method-assign]


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it, by closing stdin
    binding()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        log = order.pop("log")
        pid = os.fork()
        if pid == 0:
            become_worker(order, log)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
