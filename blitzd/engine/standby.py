"""The mapped model that an idle worker keeps at hand, so that it answers within a blink.

A worker without weights is a spare. What takes long when it gets them is not the mapping: it
is its tokenizer (130 ms of a core), hashing the file (40 ms) and the first forward pass, for
which kernels are made (90 ms). All three are done before anybody asks: the file stays mapped,
which costs no memory, and is hashed again only after it has changed.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

import structlog

from blitzd.engine.errors import Corrupt, InvalidField
from blitzd.engine.options import ReplicaOptions
from blitzd.engine.prepared import Prepared, open_prepared
from blitzd.proto.blitzd.engine import v1 as pb

FILES = ("model.json", "arena.bin", "tokenizer.json")
WARM_BLOCKS = 1
WARM_TOKENS = 32
WARM_S = 30.0

log = structlog.get_logger()

Stamp = tuple[tuple[int, int, int, int], ...]


class Standby:
    """One model at most. Its calls are for threads that may wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None
        self._stamp: Stamp = ()
        self._taken = False

    def take(self, directory: Path, tell: Callable[[pb.LoadProgress], None]) -> Prepared:
        """The model of `directory`, mapped: what is at hand, if the files are those that it was
        made of, else opened now. Raises what `open_prepared` raises."""
        self._taken = True
        return self._open(directory, tell)

    def _open(self, directory: Path, tell: Callable[[pb.LoadProgress], None]) -> Prepared:
        with self._lock:
            stamp = _stamp(directory)
            kept = self._prepared
            if kept is not None and kept.directory == directory and stamp == self._stamp:
                tell(_whole(kept))
                return kept
            self._prepared = None
            prepared = open_prepared(directory, tell)
            self._prepared, self._stamp = prepared, stamp
            return prepared

    def warm(self, directory: Path, options: ReplicaOptions) -> None:
        """Opens the model and runs a forward pass of it, unless somebody has taken one by then.
        Whatever is wrong with it shows when it is loaded."""
        began = time.monotonic()
        with contextlib.suppress(InvalidField, Corrupt, MemoryError):
            prepared = self._open(directory, lambda moved: None)
            if not self._taken:
                _run_once(prepared, options)
                log.info("standing by", ms=round((time.monotonic() - began) * 1e3))


def _stamp(directory: Path) -> Stamp:
    found = []
    for name in FILES:
        with contextlib.suppress(OSError, ValueError):
            stat = os.stat(directory / name)
            found.append((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _whole(prepared: Prepared) -> pb.LoadProgress:
    return pb.LoadProgress(
        layers_ready=prepared.layout.layers,
        layers_total=prepared.layout.layers,
        bytes_loaded=len(prepared.weights),
        bytes_total=len(prepared.weights),
        source="map",
    )


def _run_once(prepared: Prepared, options: ReplicaOptions) -> None:
    from blitzd.engine.replica import open_replica

    reports: SimpleQueue[pb.StepReport | None] = SimpleQueue()
    replica = open_replica(
        prepared, WARM_BLOCKS, options, reports.put, crashed=lambda error: reports.put(None)
    )
    try:
        request = pb.Request(request_id=1, prompt_tokens=[0] * WARM_TOKENS, max_tokens=1)
        request.sampling = pb.Sampling()
        with replica.steps.exclusive() as stepper:
            stepper.prefill(request, hold=False)
        with contextlib.suppress(Empty):
            report = reports.get(timeout=WARM_S)
            while report is not None and not any(report.finish):
                report = reports.get(timeout=WARM_S)
    finally:
        replica.close(WARM_S)
