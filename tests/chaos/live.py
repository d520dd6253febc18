"""Virtual live pairs: layers that arrive, requests that run a layer at a time, and are handed
over from New to Old. Which layer runs next is what real workers ask too (`blitzd.sched.zigzag`).

What ran is noted by layer, so that none is skipped or runs twice in an attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.node.wire_ids import request_and_attempt
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched.zigzag import Waiting, next_for_old, next_on_new

if TYPE_CHECKING:
    from tests.chaos.jobs import Job
    from tests.chaos.workers import VirtualWorker, VirtualWorkers

LAYERS = 4
LIVE_TOKENS = 256
"""More a live prefill does not take."""
POLL_S = 0.02
ASK_S = 5.0
"""Of a source that does not answer, and of Old that does not say whether it has a request."""
F = pb.FinishReason


@dataclass(slots=True, eq=False, kw_only=True)
class Pending(Waiting):
    job: Job


@dataclass(eq=False)
class Live:
    """Of a worker that serves, or served, while it loads."""

    ready: int = 0
    """Layers that are there."""
    pending: list[Pending] = field(default_factory=list)
    executing: Pending | None = None
    offered: Pending | None = None
    offered_s: float = 0.0
    """Since when."""
    orders: int = 0

    @property
    def drained(self) -> bool:
        busy = self.pending or self.executing or self.offered
        return self.ready == LAYERS and not busy


class LiveWork:
    def __init__(self, workers: VirtualWorkers) -> None:
        self._workers = workers
        self.ran: dict[int, list[int]] = {}
        """By the id of an attempt."""

    # New.

    def open(self, worker: VirtualWorker) -> None:
        """The tokenizer is read: it takes prompts."""
        assert worker.live is None and worker.group is not None
        worker.live = Live()
        worker.group.start_soon(self._run, worker, worker.live)

    async def prefill(self, worker: VirtualWorker, job: Job, hold: bool) -> bool:
        """False: it has all layers and computes the prompt like anybody."""
        live = worker.live
        if live is None or live.ready == LAYERS:
            return False
        assert hold, "a live prefill holds its KV"
        if job.prompt + job.sent > LIVE_TOKENS:
            request = request_and_attempt(job.id)
            why = f"prompt_tokens: {job.prompt}; a live prefill takes {LIVE_TOKENS}"
            on = (worker.replica, worker.epoch, request[0])
            refused = ev.RequestErrored(*on, why, request[1])
            await self._workers.post(worker, refused, certain=True)
            return True
        worker.hold(job)
        live.orders += 1
        live.pending.append(Pending(order=live.orders, job=job))
        return True

    async def _run(self, worker: VirtualWorker, live: Live) -> None:
        while not live.drained:
            self._tidy(worker, live)
            one = next_on_new(live.pending, live.ready, LAYERS)
            if one is None:
                await anyio.sleep(POLL_S)
                continue
            live.executing = one
            await self._layer(worker, one.job, one.done)
            live.executing = None
            if worker.live is not live:  # its load failed
                return
            if one.job.id not in worker.holdings:
                continue
            one.done += 1
            if self._fails(0.25):
                live.pending.remove(one)
                await self._workers.fail_step(worker, one.job)
            elif one.done == LAYERS:
                live.pending.remove(one)
                await self._first_token(worker, one.job)

    def _tidy(self, worker: VirtualWorker, live: Live) -> None:
        """What was cancelled is gone; what Old said nothing of goes on here."""
        live.pending = [one for one in live.pending if one.job.id in worker.holdings]
        offered = live.offered
        if offered is None:
            return
        if offered.job.id not in worker.holdings:
            live.offered = None
        elif anyio.current_time() - live.offered_s > ASK_S:
            self._withdraw(live, offered)

    async def _layer(self, worker: VirtualWorker, job: Job, layer: int) -> None:
        await self._workers.pause(worker, 0.0005 * (job.prompt + job.sent) / LAYERS)
        self.ran.setdefault(job.id, []).append(layer)

    def _fails(self, share: float) -> bool:
        return self._workers.random.random() < self._workers.faults.step_failure * share

    async def _first_token(
        self, worker: VirtualWorker, job: Job, relayed: int | None = None
    ) -> None:
        assert self.ran[job.id] == list(range(LAYERS)), f"{job.id} ran {self.ran[job.id]}"
        worker.made[job.id] = job.sent + 1
        last = job.sent + 1 == job.max_tokens
        if last:
            del worker.holdings[job.id]
        finish = F.LENGTH if last else F.HELD
        await self._workers.token(worker, job, job.sent, finish, relayed)

    # Old.

    async def follow(self, worker: VirtualWorker, command: cmd.FollowLive) -> None:
        workers = self._workers
        new = workers.workers.get((command.new, command.new_epoch))
        fault, taken, silent_s = "", 0, 0.0
        while True:
            await workers.pause(worker, POLL_S)
            if new is None or not new.alive or new.live is None or silent_s > ASK_S:
                fault = "source"
                break
            if new.hung:
                silent_s += POLL_S
                continue
            silent_s = 0.0
            if worker.computing:
                continue
            live = new.live
            self._tidy(new, live)
            if live.drained:
                break
            if live.offered is not None:
                continue
            one = next_for_old(live.pending, live.executing, live.ready, LAYERS)
            if one is None:
                continue
            live.pending.remove(one)
            live.offered, live.offered_s = one, anyio.current_time()
            fault = await self._take(worker, new, live, one)
            if fault:
                break
            taken += 1
        reason = "its source was lost" if fault else ""
        on = (command.old, command.old_epoch)
        ended = ev.FollowEnded(command.pair_id, *on, taken, fault, reason)
        await workers.post(worker, ended, certain=True)

    async def _take(self, old: VirtualWorker, new: VirtualWorker, live: Live, one: Pending) -> str:
        """Moves the hidden states, and says so to New. Returns what went wrong."""
        workers, job = self._workers, one.job
        refuses = workers.random.random() < workers.faults.no_room * 0.2
        if refuses:
            await workers.pause(old, 0.05)
            self._withdraw(live, one)
            return ""
        old.hold(job)
        await workers.pause(old, 0.003)
        silent = workers.random.random() < workers.faults.lost_ack
        heard = not silent or workers.random.random() < 0.5
        granted = heard and new.alive and live.offered is one and job.id in new.holdings
        if granted:
            live.offered = None
            self._give_away(new, one)
        elif live.offered is one:
            self._withdraw(live, one)
        if not granted or silent:
            old.holdings.pop(job.id, None)
            return "source" if silent or not new.alive else ""
        if job.id in old.holdings:  # or it was cancelled on its way
            assert old.group is not None
            old.computing += 1
            old.group.start_soon(self._finish, old, one)
        return ""

    def _withdraw(self, live: Live, one: Pending) -> None:
        live.offered = None
        live.pending = sorted([*live.pending, one], key=lambda pending: pending.order)

    def _give_away(self, new: VirtualWorker, one: Pending) -> None:
        if one.done:
            new.halves[one.job.id] = (0, one.done)
            new.made[one.job.id] = one.job.sent + 1
        else:
            del new.holdings[one.job.id]
        assert new.group is not None
        new.group.start_soon(self._say_relayed, new, one)

    async def _say_relayed(self, new: VirtualWorker, one: Pending) -> None:
        """Before or after the word of the other."""
        await self._workers.pause(new, self._workers.random.choice([0.0, 0.0, 0.1]))
        report = pb.StepReport(relayed_ids=[one.job.id], relayed_layers=[one.done])
        await self._workers.deliver(new, report)

    async def _finish(self, old: VirtualWorker, one: Pending) -> None:
        job = one.job
        try:
            for layer in range(one.done, LAYERS):
                await self._layer(old, job, layer)
        finally:
            old.computing -= 1
        if job.id not in old.holdings:
            return
        if self._fails(1.0):
            await self._workers.fail_step(old, job)
            return
        if one.done:
            old.halves[job.id] = (one.done, LAYERS)
        await self._first_token(old, job, one.done)


def has_half(worker: VirtualWorker | None, attempt: int, first: int, last: int) -> bool:
    """Whether it holds the KV of just these layers."""
    if worker is None or not worker.alive or attempt not in worker.holdings:
        return False
    return worker.halves.get(attempt, (0, LAYERS)) == (first, last)
