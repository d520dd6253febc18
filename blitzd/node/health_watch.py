"""Whether a worker still works: its event loop answers, its step loop moves.

Two deadlines, since the two can stall apart. A stopped process, or an event loop that is
stuck, is *silent*: no answer to Health and no step report. A step loop that is stuck lets
Health be answered for ever, with the same step number. A long step is neither: it runs in a
thread of its own, and its deadline is the longer one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from blitzd.node.worker_calls import CallFailed, describe_failure
from blitzd.proto.blitzd.engine import v1 as pb

PERIOD_S = 1.0
"""Between the last sign of life and the next question, at most; a quarter of a shorter
deadline."""
RESTS = 10
"""Periods without a question, at most: a busy worker may hold what nobody knows of, or not what
it should (`control/pairs.py`)."""


class HealthWatch:
    """Of one worker. Time counts only as far as this process was there to listen: after it was
    stopped itself, or its machine was, the answers are in the socket and blame nobody."""

    def __init__(
        self, ask: Callable[[], Awaitable[pb.HealthReply]], silence_s: float, step_s: float
    ) -> None:
        """`ask` has no deadline of its own."""
        self._ask = ask
        self._silence_s = silence_s
        self._step_s = step_s
        self._period_s = min(PERIOD_S, silence_s / 4)
        self._silent_s = 0.0
        self._heard_at = 0.0
        self._unanswered = "no answer to Health"
        self._step = -1

    def heard(self) -> None:
        """A sign of life came another way."""
        self._silent_s = 0.0
        self._heard_at = time.monotonic()

    async def failure(self) -> str:
        """Returns, with the reason, once the worker is to be ended."""
        while True:
            answer = asyncio.ensure_future(self._ask())
            answer.add_done_callback(_look_at)
            try:
                while not answer.done():
                    if self._silent_s >= self._silence_s:
                        return f"silent for {self._silence_s:g} s: {self._unanswered}"
                    await self._wait(answer)
            finally:
                answer.cancel()
            try:
                reply = answer.result()
            except CallFailed as error:
                self._unanswered = describe_failure(error)
            else:
                self.heard()
                if stuck := self._stuck(reply):
                    return stuck
            await self._rest()

    def _stuck(self, reply: pb.HealthReply) -> str:
        """Twice the same step: one answer alone may come from just after a pause."""
        again = reply.step == self._step and reply.idle_ns >= self._step_s * 1e9
        self._step = reply.step
        took = reply.idle_ns / 1e9
        return f"computing step {reply.step} for {took:.1f} s" if again else ""

    async def _wait(self, answer: asyncio.Future[pb.HealthReply]) -> None:
        tick_s = min(self._silence_s / 20, self._silence_s - self._silent_s)
        await self._count(asyncio.wait([answer], timeout=tick_s), tick_s)

    async def _rest(self) -> None:
        """Until nothing was heard for a period, and no longer than `RESTS` of them: who reports
        steps need not be asked too, but what it holds is told with the answer alone."""
        ends = time.monotonic() + RESTS * self._period_s
        left_s = self._period_s
        while left_s > 0 and time.monotonic() < ends:
            await self._count(asyncio.sleep(left_s), left_s)
            left_s = self._period_s - self._silent_s

    async def _count(self, wait: Awaitable[object], planned_s: float) -> None:
        began = time.monotonic()
        await wait
        since = max(began, self._heard_at)
        self._silent_s += min(time.monotonic() - since, 2 * planned_s)


def _look_at(answer: asyncio.Future[pb.HealthReply]) -> None:
    """A call that is cancelled may end in an error of its connection, which nobody awaits."""
    if not answer.cancelled():
        answer.exception()
