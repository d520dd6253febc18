"""The agent: a node's daemon when another one is the controller.

It starts and ends workers as it is told and says what became of them; the controller speaks
to the workers itself. It decides one thing alone: without an answered beat for a lease it ends
every worker, since by then the controller counts on none of them (fencing). The lease runs
from the sending of the last beat that was answered, so it is over here before it is there.
"""

import asyncio
import contextlib
import os
import platform
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import cast

import structlog
from grpclib.client import Channel
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

import blitzd
from blitzd.engine.layout import read_model_file
from blitzd.fabric import channel_to
from blitzd.fabric.endpoints import host_and_port
from blitzd.node.agent_journal import AgentJournal, Known
from blitzd.node.agent_workers import AgentWorkers
from blitzd.node.config import NodeConfig
from blitzd.node.paths import runtime_dir
from blitzd.node.worker_calls import describe_failure
from blitzd.proto.blitzd.node import v1 as pb

BEATS = 5
"""In a lease."""
BEAT_S = 1.0
"""Before the controller has said how long a lease is."""
RETRY_S = (0.2, 1.0)
"""Between two tries to get in contact: at first, and at most."""
WELCOME_S = 10.0
LEAVE_S = 2.0
"""For the controller to hear of our leave."""
UNSENT = 4096

log = structlog.get_logger()


Answers = AsyncGenerator[pb.ControllerMessage]


class Fenced(Exception):
    """The lease is over."""


class Agent:
    def __init__(self, config: NodeConfig) -> None:
        """Raises OSError, ValueError."""
        self.config = config
        self._digest = read_model_file(config.model_dir).config.digest
        self._journal = AgentJournal(config.state_dir)
        self._workers: AgentWorkers | None = None
        self._unsent: deque[pb.AgentMessage] = deque(maxlen=UNSENT)
        """Kept over the end of a contact; what is lost the next hello makes good."""
        self._wake = asyncio.Event()
        self._contacts = 0
        self._beats: dict[int, float] = {}
        """When those were sent that were not answered yet."""
        self._beat = 0
        self._lease_until: float | None = None
        """None: there is no lease, and no worker."""
        self._channel: Channel | None = None
        self._leaving = ""
        self._stopped = asyncio.Event()
        self.in_contact = False

    async def run(self, ready: Callable[[], None]) -> None:
        """Until it is told to stop. `ready` is called once workers could be started."""
        workers = self._workers = AgentWorkers(
            self.config,
            runtime_dir(self.config.state_dir),
            self._journal,
            self._tell_started,
            self._tell_exited,
        )
        workers.adopt()
        if workers.live:
            # Its controller may have given up on the last start of this agent already, or not.
            self._lease_until = time.monotonic() + self._journal.lease_s
        ready()
        fence = asyncio.create_task(self._fence())
        contact = asyncio.create_task(self._stay_in_contact())
        try:
            await self._stopped.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await asyncio.wait([contact])
        finally:
            fence.cancel()
            contact.cancel()
            await asyncio.wait([fence, contact])
            await workers.end_all_but(())
            self._journal.close()
            with contextlib.suppress(OSError):  # something else is in it
                runtime_dir(self.config.state_dir).rmdir()

    def stop(self, reason: str) -> None:
        """Takes leave of the controller, then ends the workers."""
        self._leaving = reason
        self._stopped.set()
        self._say(pb.AgentMessage(leaving=pb.Leaving(reason=f"its agent stops: {reason}")))

    # What the controller is told.

    def _say(self, message: pb.AgentMessage) -> None:
        self._unsent.append(message)
        self._wake.set()

    def _tell_started(self, known: Known) -> None:
        self._say(pb.AgentMessage(started=pb.Started(worker=_wire(known))))

    def _tell_exited(self, replica: str, epoch: int, reason: str) -> None:
        exited = pb.Exited(replica_id=replica, epoch=epoch, reason=reason)
        self._say(pb.AgentMessage(exited=exited))

    def _hello(self) -> pb.Hello:
        assert self._workers is not None
        config = self.config
        replicas = config.replicas()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return pb.Hello(
            node=config.node,
            epoch=self._journal.epoch,
            version=blitzd.__version__,
            address=config.address,
            arch=platform.machine(),
            cpus=os.cpu_count() or 1,
            memory_mib=memory >> 20,
            model_digest=self._digest,
            model_path=str(config.model_dir),
            kv_blocks=config.kv_blocks,
            replica_ids=[replica for replica, _ in replicas],
            roles=[role for _, role in replicas],
            live=[_wire(known) for known in self._workers.live],
        )

    async def _messages(self) -> AsyncIterator[pb.AgentMessage]:
        """Of one contact. Of what happened before, the hello tells the rest."""
        self._contacts += 1
        mine = self._contacts
        self._wake.set()
        self._unsent.clear()
        if self._leaving:
            return
        yield pb.AgentMessage(hello=self._hello())
        # The stub leaves the messages of a contact that has ended to wait for ever.
        while mine == self._contacts:
            while self._unsent:
                message = self._unsent.popleft()
                yield message
                if message.leaving is not None:
                    return
            self._wake.clear()
            lease_s = self._journal.lease_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lease_s / BEATS if lease_s else BEAT_S):
                    await self._wake.wait()
            if not self._unsent and mine == self._contacts:
                self._beat += 1
                self._beats[self._beat] = time.monotonic()
                yield pb.AgentMessage(beat=pb.Beat(number=self._beat))

    # Contact and lease.

    async def _stay_in_contact(self) -> None:
        """Whatever ends a contact, there is another: nobody else would begin one."""
        wait_s, told = RETRY_S[0], ""
        while not self._leaving:
            # A task of its own: the channel cancels those that read from it when it is closed.
            contact = asyncio.create_task(self._contact())
            try:
                await asyncio.wait([contact])
            finally:
                contact.cancel()
                welcomed, self.in_contact = self.in_contact, False
                self._beats.clear()
            error = None if contact.cancelled() else contact.exception()
            if isinstance(error, ProtocolError):  # grpclib: the other side ended the stream
                error = None
            why = self._describe(error, welcomed)
            if why != told:
                log.warning("out of contact", controller=self.config.controller, reason=why)
                if not isinstance(error, EXPECTED | None):
                    log.error("a contact failed", exc_info=error)
            told = why
            wait_s = RETRY_S[0] if error is None else min(2 * wait_s, RETRY_S[1])
            await asyncio.sleep(wait_s)

    def _describe(self, error: BaseException | None, welcomed: bool) -> str:
        """Why a contact has ended, in the words of the configuration where it is to blame."""
        if error is None:
            return "the controller ended it"
        why = describe_failure(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            host, _ = host_and_port(self.config.controller)
            return (
                f"node.tls_ca: {error.verify_message.rstrip('.')}; accepted: a controller whose"
                f" certificate that authority has signed, and which names {host}"
            )
        if isinstance(error, StreamTerminatedError) and not welcomed:
            # Of a handshake that fails on its side, the server says no more than that.
            wants = (
                "it wants a certificate, node.tls_cert, that the authority in its node.tls_ca"
                " has signed"
            )
            return f"the controller hung up before a word ({why}); as a rule {wants}"
        return why

    async def _contact(self) -> None:
        """Returns when the controller ends it."""
        began = time.monotonic()
        async with channel_to(self.config.controller, self.config.tls) as channel:
            self._channel = channel
            answers = cast(Answers, pb.NodesStub(channel).attach(self._messages()))
            async with contextlib.aclosing(answers):
                async with asyncio.timeout(WELCOME_S):
                    first = await anext(answers, pb.ControllerMessage())
                if first.welcome is None:
                    return
                await self._welcomed(first.welcome, began)
                async for message in answers:
                    if self._lease_until is None or time.monotonic() >= self._lease_until:
                        raise Fenced("the lease was over")
                    self._take(message)

    async def _welcomed(self, welcome: pb.Welcome, began: float) -> None:
        assert self._workers is not None
        self._journal.promise(welcome.lease_ms)
        kept = {(worker.replica_id, worker.epoch) for worker in welcome.keep}
        await self._workers.end_all_but(kept)
        self._lease_until = began + self._journal.lease_s
        self.in_contact = True
        log.info("in contact", controller=self.config.controller, kept=len(kept))

    def _take(self, message: pb.ControllerMessage) -> None:
        assert self._workers is not None
        if message.beat is not None:
            sent = self._beats.pop(message.beat.number, None)
            if sent is not None:
                self._lease_until = sent + self._journal.lease_s
        elif (spawn := message.spawn) is not None:
            self._workers.spawn(spawn.replica_id, spawn.epoch)
        elif (end := message.end) is not None:
            self._workers.end(end.replica_id, end.epoch, end.grace_ms / 1e3)

    async def _fence(self) -> None:
        """Ends the workers with the lease."""
        assert self._workers is not None
        while True:
            now, until = time.monotonic(), self._lease_until
            if until is not None and now >= until:
                log.error("the lease is over: ending all workers", lease_s=self._journal.lease_s)
                self._lease_until = None
                if self._channel is not None:
                    self._channel.close()  # what it still brings is of before
                await self._workers.end_all_but(())
            tick_s = (self._journal.lease_s or BEAT_S) / (4 * BEATS)
            await asyncio.sleep(tick_s if until is None else max(0.0, min(until - now, tick_s)))


EXPECTED = GRPCError | StreamTerminatedError | OSError | TimeoutError | Fenced


def _wire(known: Known) -> pb.Worker:
    return pb.Worker(
        replica_id=known.replica, epoch=known.epoch, pid=known.pid, endpoint=known.endpoint
    )
