"""The driver: one ordered inbox, then decide, append, act (house rule 2).

Every input, whatever its origin, goes through the inbox; a turn takes one, lets the core
decide, appends what was decided, waits for the disk if a record of the turn asks for it,
and only then performs the commands. Tokens do not pass through here: `deliver` routes
them from a worker's step report to the clients, and turns only milestones into inputs.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from itertools import filterfalse
from typing import Any

import anyio
import msgspec
import structlog

from blitzd.control.commands import Command, ImportKv, ShutDown, waits_for_the_log
from blitzd.control.core import Core
from blitzd.events import types as ev
from blitzd.events.record import Durability, Payload, Record
from blitzd.events.snapshot import Snapshot
from blitzd.node.asked import Asked
from blitzd.node.delivery import Delivery
from blitzd.node.face import CommandFailed, GenerateRequest, Observations, RequestRefused
from blitzd.node.live import LiveRequest
from blitzd.node.ports import Clock, Journal, JournalUnavailable, Workers
from blitzd.node.state_audit import audit_when_idle
from blitzd.proto.blitzd.engine import v1 as pb

INBOX_BOUND = 4096
TICK_S = 0.05
QUIET_TICK_S = 0.5
"""While nothing runs that has a deadline."""
COMMAND_DEADLINE_S = 10.0
"""For the turn of an operator's command, its sync included."""
GROUP_SYNC_S = 0.005
"""Half of the promised 10 ms, since the sync itself takes time."""

SNAPSHOT_EVERY = 100_000
"""Records. Folding as many takes a start well under a second."""
SNAPSHOT_CHECK_S = 1.0

log = structlog.get_logger()

MS = 1_000_000


class Driver:
    def __init__(
        self,
        core: Core,
        journal: Journal,
        clock: Clock,
        observations: Observations,
        draw_seed: Callable[[], int],
        first_request_id: int,
        snapshot_every: int = SNAPSHOT_EVERY,
    ) -> None:
        self.core = core
        self.observations = observations
        self.read_only: str = ""
        """Why the log takes no records; empty while it does."""
        self.live: dict[int, LiveRequest] = {}
        self.turned = anyio.Event()
        """Set, and replaced, after each turn that changed the state."""
        self.last_turn_ns = clock.mono_ns()
        self._journal = journal
        self._clock = clock
        self._draw_seed = draw_seed
        self._next_request_id = first_request_id
        self._snapshot_every = snapshot_every
        self._snapshot_due = journal.snapshot_seq + snapshot_every
        self._backlog: list[list[Record]] = []
        """Turns that the log has not taken yet, in order."""
        self._stopped = False
        self._held: list[Command] = []
        self._unsynced = anyio.Event()
        self._inbox_in, self._inbox = anyio.create_memory_object_stream[Payload | Asked | None](
            INBOX_BOUND
        )
        self._asked: set[Asked] = set()
        self._milestones: deque[Payload] = deque()
        """What tokens that clients have got already imply. Before anything else in the inbox:
        a request whose last token is out must not be failed because its worker then died.
        Bounded by the requests under way."""
        self._workers: Workers | None = None
        self._delivery = Delivery(
            core, self.live, observations, clock, post=self.post, reached=self._reached
        )

    async def run(self, workers: Workers, boot: ev.Booted) -> None:
        """Until the core says ShutDown. `boot` is decided first, whatever came before it: a
        signal in the middle of the start must not be about the boot before."""
        self._workers = workers
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tick)
            tasks.start_soon(self._sync_in_groups)
            tasks.start_soon(self._snapshot_when_due)
            tasks.start_soon(audit_when_idle, self.core, self.post)
            await self._turn(boot)
            async for payload in self._inbox:
                if await self._turns(payload):
                    break
            tasks.cancel_scope.cancel()
        self._stopped = True
        for live in list(self.live.values()):
            # Nobody reads the inbox any more, so these would wait for ever.
            live.abandon("draining", "the server has shut down")
        for asked in self._asked:
            asked.fail("the daemon stops", "stopping")
        await self._sync()
        await self._snapshot()

    # Inputs.

    async def post(self, payload: Payload) -> None:
        """Waits while the inbox is full, which slows the sender and loses nothing."""
        await self._inbox_in.send(payload)

    async def command(self, payload: Payload) -> list[Record]:
        """What the turn of an operator's command decided, once that is on disk. Raises
        CommandFailed if it is not, or not known in time."""
        if self._stopped:
            raise CommandFailed("the daemon stops", status=503, code="stopping")
        if self.read_only:
            reason = f"the event log takes no records: {self.read_only}"
            raise CommandFailed(reason, status=503, code="read_only")
        asked = Asked(payload)
        self._asked.add(asked)
        try:
            with anyio.fail_after(COMMAND_DEADLINE_S):
                await self._inbox_in.send(asked)
                return await asked.answer()
        except TimeoutError:
            reason = (
                f"not decided within {COMMAND_DEADLINE_S:.0f} s; it may be yet: the event log"
                " will say, and the command may be repeated"
            )
            raise CommandFailed(reason, status=503, code="not_decided") from None
        finally:
            self._asked.discard(asked)

    def _reached(self, milestone: Payload) -> None:
        self._milestones.append(milestone)
        with contextlib.suppress(anyio.WouldBlock):  # full: whoever is in it wakes the loop
            self._inbox_in.send_nowait(None)

    async def generate(self, request: GenerateRequest) -> LiveRequest:
        """Returns once the request is in the log as accepted. Raises RequestRefused."""
        if self._stopped:
            raise RequestRefused("the server has shut down", status=503, code="draining")
        if self.read_only:
            raise RequestRefused(
                f"the event log takes no records: {self.read_only}", status=503, code="read_only"
            )
        deadline_ms = self._deadline_ms(request)
        request_id = self._next_request_id
        self._next_request_id += 1
        seed = self._draw_seed() if request.seed is None else request.seed
        live = LiveRequest(request_id, request, seed, self._client_left)
        live.submitted_ns = self._clock.mono_ns()
        self.live[request_id] = live
        arrival = ev.RequestArrived(
            request_id,
            len(request.prompt_tokens),
            request.max_tokens,
            seed,
            live.submitted_ns + deadline_ms * MS,
            int(request.recompute),
        )
        try:
            await self.post(arrival)
            await live.decided()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await live.cancel()
            raise
        return live

    def _deadline_ms(self, request: GenerateRequest) -> int:
        longest = self.core.policy.request_deadline_ms
        if request.deadline_ms is not None and request.deadline_ms > longest:
            reason = f"deadline_ms is {request.deadline_ms}; accepted: at most {longest}"
            raise RequestRefused(reason, status=400, code="invalid_value")
        return request.deadline_ms or longest

    async def _client_left(self, request_id: int) -> None:
        self.live.pop(request_id, None)
        await self.post(ev.ClientLeft(request_id))

    async def deliver(self, replica: str, epoch: int, report: pb.StepReport) -> None:
        """Routes one step's tokens to their clients and its milestones to the inbox."""
        await self._delivery.deliver(replica, epoch, report)

    # Turns.

    async def _turns(self, item: Payload | Asked | None) -> bool:
        """Milestones, then the input. True when the daemon is to stop."""
        while self._milestones:
            if await self._turn(self._milestones.popleft()):
                return True
        if isinstance(item, Asked):
            return await self._turn(item.payload, item)
        return item is not None and await self._turn(item)

    async def _turn(self, payload: Payload, asked: Asked | None = None) -> bool:
        """One input. True when the daemon is to stop."""
        self.last_turn_ns = self._clock.mono_ns()
        step = self.core.step(payload, self.last_turn_ns, self._clock.wall_ns(), self._sent)
        if step.fault is not None:
            log.error("a decision failed", input=repr(payload), exc_info=step.fault)
        if step.records:
            self._append(step.records)
        commands = step.commands
        if any(r.payload.durability is Durability.ACK for r in step.records):
            await self._sync()
            if self.read_only:
                # Nothing begins on a decision that is not on disk.
                self._held += filter(waits_for_the_log, commands)
                commands = list(filterfalse(waits_for_the_log, commands))
        # First: a command is about the attempt that its turn has begun.
        for record in step.records:
            self._tell(record.payload)
        for command in commands:
            self._perform(command)
        if step.records:
            self.turned.set()
            self.turned = anyio.Event()
        if asked is not None:
            asked.decided(step, self.read_only)
        return any(isinstance(command, ShutDown) for command in commands)

    def _append(self, records: list[Record]) -> None:
        self._backlog.append(records)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._backlog:
                self._journal.append(self._backlog[0])
                del self._backlog[0]
            if self.read_only:
                self._journal.append([])  # is there room again?
        except JournalUnavailable as error:
            if not self.read_only:
                log.error("the event log takes no records; serving on", reason=str(error))
            self.read_only = str(error)
            return
        self._unsynced.set()
        if self.read_only:
            log.info("the event log takes records again")
            self.read_only = ""
            self._perform_held()

    def _perform_held(self) -> None:
        held, self._held = self._held, []
        for command in held:
            # The cancel of a lease that has ended waited for nothing, and nobody would hear
            # what comes of it now. What else is over, its replica or attempt is, too.
            if not isinstance(command, ImportKv) or command.lease_id in self.core.state.leases:
                self._perform(command)

    async def _sync(self) -> None:
        self._unsynced = anyio.Event()
        try:
            await self._journal.sync()
        except JournalUnavailable as error:
            self.read_only = str(error)

    async def _sync_in_groups(self) -> None:
        while True:
            await self._unsynced.wait()
            await anyio.sleep(GROUP_SYNC_S)
            await self._sync()

    async def _snapshot_when_due(self) -> None:
        while True:
            await anyio.sleep(SNAPSHOT_CHECK_S)
            if self.core.state.seq >= self._snapshot_due:
                await self._snapshot()

    async def _snapshot(self) -> None:
        """Leaves the state where the next start finds it. One that fails is no loss: the log
        has everything, and reading it takes longer."""
        state = self.core.state
        self._snapshot_due = state.seq + self._snapshot_every
        if self._backlog or state.seq == self._journal.snapshot_seq:
            return  # the state is ahead of the log, or nothing is new
        try:
            await self._journal.snapshot(Snapshot(state.seq, state.hash(), state.encode()))
        except JournalUnavailable as error:
            log.warning("no snapshot", seq=state.seq, reason=str(error))

    async def _tick(self) -> None:
        while True:
            if not self.core.state.requests and not self._backlog:
                with anyio.move_on_after(QUIET_TICK_S):
                    await self.turned.wait()
            await anyio.sleep(TICK_S)
            if self._backlog or self.read_only:
                self._flush()
            await self.post(ev.Ticked())

    def _sent(self, request_id: int) -> int:
        live = self.live.get(request_id)
        return 0 if live is None else len(live.output)

    def _perform(self, command: Command) -> None:
        assert self._workers is not None
        self._workers.perform(command, self.live.get(getattr(command, "request_id", 0)))

    def _tell(self, event: Payload) -> None:
        """Lets clients know what was decided about their requests, and people what went
        wrong."""
        failed_for_good = isinstance(event, ev.MigrationFailed) and not event.retry_ns
        if isinstance(event, ev.LoadFailed | ev.RequestResumed) or failed_for_good:
            log.warning(type(event).__name__, **msgspec.structs.asdict(event))
        teller = TELLERS.get(type(event))
        if teller is None:
            return
        live = self.live.get(event.request_id)  # type: ignore[attr-defined]
        if live is None:
            return
        teller(live, event)
        if type(event) in (ev.RequestAccepted, ev.RequestResumed):
            return
        if type(event) is ev.PrefillStarted:
            waited = self._clock.mono_ns() - live.submitted_ns
            self.observations.queue_s.observe(waited / 1e9)
            return
        if type(event) is ev.RequestFinished:
            took = self._clock.mono_ns() - live.submitted_ns
            self.observations.e2e_s.observe(took / 1e9)
        self.live.pop(live.request_id, None)


TELLERS: dict[type[Payload], Callable[[LiveRequest, Any], None]] = {
    ev.RequestAccepted: lambda live, event: live.accept(),
    ev.PrefillStarted: lambda live, event: None,
    ev.RequestResumed: lambda live, event: live.resume(),
    ev.RequestRejected: lambda live, event: live.refuse(event.code, event.reason),
    ev.RequestFinished: lambda live, event: live.finish(event.finish),
    ev.RequestFailed: lambda live, event: live.fail(event.code, event.reason),
    ev.RequestCancelled: lambda live, event: live.fail("cancelled", event.reason),
}
