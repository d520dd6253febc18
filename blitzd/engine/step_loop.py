"""The thread that computes.

Nobody else waits for it: requests are added, cancelled and handed over by the event loop
under a lock that the thread gives up while it computes, so what they wait for is the
bookkeeping of a step (well under a millisecond), never a step. With nothing to run the
thread sleeps until something changes.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import structlog

from blitzd.engine.live_stepper import LayerStep, LiveStepper
from blitzd.engine.stepper import Occupancy
from blitzd.proto.blitzd.engine import v1 as pb

log = structlog.get_logger()


class StepLoop:
    """Not allowed to block: `publish`, called under the lock with the report of each step, and
    of each change of occupancy without one; `crashed`, called on the loop's thread, once, if the
    loop itself fails (a step whose computation fails does not end the loop)."""

    def __init__(
        self,
        stepper: LiveStepper,
        publish: Callable[[pb.StepReport], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._stepper = stepper
        self._publish = publish
        self._crashed = crashed
        self._changed = threading.Condition()
        self._stopping = False
        self._moved_ns = 0
        self._told = stepper.occupancy
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after the step that is running. False when it did not end in
        time; it is a daemon thread, so the process can."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[LiveStepper]:
        """The stepper, for its request methods. Keep it short: no step begins or ends
        meanwhile."""
        with self._changed:
            yield self._stepper
            self._changed.notify()

    def report(self) -> None:
        """Publishes what has changed without a step, and does not wait for the next one."""
        with self._changed:
            self._tell(self._stepper.idle_report())

    @property
    def steps(self) -> int:
        return self._stepper.steps

    @property
    def occupancy(self) -> Occupancy:
        with self._changed:
            return self._stepper.occupancy

    @property
    def holdings(self) -> tuple[int, list[int]]:
        """(KV blocks used, ids of the requests that are here)."""
        with self._changed:
            return self._stepper.occupancy.blocks_used, self._stepper.request_ids

    @property
    def idle_ns(self) -> int:
        """Since the loop last moved; 0 while it has nothing to do."""
        moved = self._moved_ns
        return time.monotonic_ns() - moved if moved else 0

    # -- on the thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._move()
        except BaseException as error:
            log.exception("the step loop failed")
            self._crashed(error)

    def _move(self) -> None:
        with self._changed:
            step = self._stepper.begin()
            if step is None:
                self._rest()
                return
        self._moved_ns = time.monotonic_ns()
        result = self._stepper.compute(step)
        with self._changed:
            report = self._stepper.finish(step, result)
            if not isinstance(step, LayerStep) or step.is_news(report):
                self._tell(report)

    def _tell(self, report: pb.StepReport) -> None:
        """Holds the lock, so that reports leave in the order in which they were made."""
        self._told = self._stepper.occupancy
        self._publish(report)

    def _rest(self) -> None:
        """Until something changes. Holds the lock, except while it sleeps."""
        self._moved_ns = 0
        if self._stepper.occupancy != self._told:
            self._tell(self._stepper.idle_report())
        try:
            self._stepper.audit()
        except AssertionError as error:
            log.error("blocks do not add up", error=str(error))
        if not self._stopping:
            self._changed.wait()
