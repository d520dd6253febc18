"""The controller's side of other nodes: their agents call, say what they offer, and hold a
lease for as long as they are heard of.

An agent that is out of contact keeps its workers until its lease runs out here; those workers
speak to us directly, so they serve on. By then the agent has ended them (`agent.py` counts
from the sending of a beat, we from its arrival), and their identities are never used again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpclib.events
import structlog
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.server import Server

from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.node.config import NodeConfig
from blitzd.node.hello import certified_names, names_of_peer, refusal
from blitzd.node.remote_process import RemoteProcess
from blitzd.node.worker import Home
from blitzd.proto.blitzd.node import v1 as pb

HELLO_S = 5.0
OUTBOX = 1024
"""Messages to one agent that does not take them; then it is cut off."""
CLOSE_S = 2.0
NODES = 1024

log = structlog.get_logger()

Key = tuple[str, int]
"""(replica, epoch)."""


class Host(Protocol):
    """Who is to know what agents say about workers: the pool."""

    def started(self, node: str, replica: str, epoch: int, pid: int, endpoint: str) -> None: ...

    def exited(self, node: str, replica: str, epoch: int, reason: str) -> None: ...

    def rejoined(self, node: str, live: Mapping[Key, pb.Worker]) -> list[Key]:
        """Those of `live` that go on. What else was known there is over."""

    def gave_up(self, node: str) -> None:
        """It is not waited for any more."""


class Contact:
    def __init__(self) -> None:
        self.outbox: asyncio.Queue[pb.ControllerMessage] = asyncio.Queue(OUTBOX)
        self.over = asyncio.Event()
        """It is not wanted any more."""


@dataclass(eq=False)
class Member:
    """A node that holds a lease."""

    hello: pb.Hello
    contact: Contact | None = None
    """None: out of contact."""
    silent_s: float = 0.0
    lease: "asyncio.Task[None] | None" = None

    def cut_off(self) -> None:
        if self.contact is not None:
            self.contact.over.set()
            self.contact = None


class Hub(pb.NodesBase):
    def __init__(
        self, config: NodeConfig, digest: str, post: Callable[[Payload], Awaitable[None]]
    ) -> None:
        """`digest` is that of the model that is served. `post` takes inputs."""
        self._config = config
        self.digest = digest
        self._post = post
        self._host: Host | None = None
        self._members: dict[str, Member] = {}
        self._awaited: dict[str, asyncio.Task[None]] = {}
        """Nodes of the last boot that have not come back yet."""
        self._server: Server | None = None

    def serve(self, host: Host) -> None:
        self._host = host

    async def start(self, awaited: Mapping[str, int]) -> None:
        """Listens, and waits a lease for those nodes (and the epochs of their agents) of the
        last boot. Raises OSError."""
        config = self._config
        if not config.tls.ca:
            log.warning(
                "node.insecure: nodes talk over plain TCP; who reaches the port can join, and"
                " read and forge what is said",
                address=config.address,
                port=config.node_port,
            )
        server = Server([self])
        grpclib.events.listen(server, grpclib.events.RecvRequest, names_of_peer)
        await server.start(config.address, config.node_port, ssl=config.tls.server)
        self._server = server
        log.info("listening for nodes", address=config.address, port=config.node_port)
        for node, epoch in awaited.items():
            self._awaited[node] = asyncio.create_task(self._await(node, epoch))

    async def close(self) -> None:
        for member in self._members.values():
            member.cut_off()
            if member.lease is not None:
                member.lease.cancel()
        self._members.clear()
        for waiting in self._awaited.values():
            waiting.cancel()
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._server.wait_closed()

    # For the pool.

    def home(self, node: str) -> Home | None:
        """None: the node holds no lease."""
        member = self._members.get(node)
        if member is None:
            return None
        return Home(node, member.hello.model_path, member.hello.kv_blocks)

    def process(
        self, node: str, replica: str, epoch: int, on_exit: Callable[[str], None]
    ) -> RemoteProcess:
        return RemoteProcess(lambda message: self._send(node, message), replica, epoch, on_exit)

    def _send(self, node: str, message: pb.ControllerMessage) -> bool:
        member = self._members.get(node)
        if member is None or member.contact is None:
            return False
        try:
            member.contact.outbox.put_nowait(message)
        except asyncio.QueueFull:
            log.error("a node does not take what it is told", node=node)
            member.cut_off()
            return False
        return True

    # A contact.

    async def attach(
        self, messages: AsyncIterator[pb.AgentMessage]
    ) -> AsyncIterator[pb.ControllerMessage]:
        hello = await self._hello(messages)
        member, contact = await self._admit(hello)
        reading = asyncio.create_task(self._read(member, contact, messages))
        try:
            while not (contact.over.is_set() or reading.done()):
                sending = asyncio.create_task(contact.outbox.get())
                ended = asyncio.create_task(contact.over.wait())
                await asyncio.wait([sending, ended, reading], return_when=asyncio.FIRST_COMPLETED)
                ended.cancel()
                if not sending.done():
                    sending.cancel()
                    continue
                yield sending.result()
        finally:
            reading.cancel()
            if member.contact is contact:
                member.contact = None
                log.warning("out of contact with a node", node=hello.node)

    async def _hello(self, messages: AsyncIterator[pb.AgentMessage]) -> pb.Hello:
        """Raises GRPCError."""
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            first = pb.AgentMessage()
        if first.hello is None:
            raise GRPCError(Status.INVALID_ARGUMENT, "the first message must be a hello")
        why = refusal(first.hello, self._config, self.digest, certified_names.get())
        member = self._members.get(first.hello.node)
        if not why and member is not None and first.hello.epoch < member.hello.epoch:
            why = f"epoch: {first.hello.epoch}; a newer agent of {first.hello.node} has joined"
        if not why and member is None and len(self._members) >= NODES:
            why = f"{NODES} nodes have joined already"
        if why:
            log.warning("a node is refused", node=first.hello.node, reason=why)
            raise GRPCError(Status.FAILED_PRECONDITION, why)
        return first.hello

    async def _admit(self, hello: pb.Hello) -> tuple[Member, Contact]:
        assert self._host is not None
        waiting = self._awaited.pop(hello.node, None)
        if waiting is not None:
            waiting.cancel()
        member = self._members.get(hello.node)
        if member is not None:
            member.cut_off()
            if _offer(member.hello) != _offer(hello):
                await self._lose(member, "it came back with another configuration")
                member = None
        if member is None:
            member = self._members[hello.node] = Member(hello)
            member.lease = asyncio.create_task(self._expire(member))
        live = {(w.replica_id, w.epoch): w for w in hello.live}
        kept = self._host.rejoined(hello.node, live)
        member.hello, member.silent_s = hello, 0.0
        contact = member.contact = Contact()
        lease_ms = round(self._config.lease_s * 1e3)
        welcome = pb.Welcome(lease_ms=lease_ms, keep=[live[key] for key in kept])
        contact.outbox.put_nowait(pb.ControllerMessage(welcome=welcome))
        log.info("a node is in contact", node=hello.node, epoch=hello.epoch, kept=len(kept))
        await self._post(_joined(hello))
        return member, contact

    async def _read(
        self, member: Member, contact: Contact, messages: AsyncIterator[pb.AgentMessage]
    ) -> None:
        with contextlib.suppress(StreamTerminatedError):
            async for message in messages:
                if contact.over.is_set():
                    return
                await self._take(member, message)

    async def _take(self, member: Member, message: pb.AgentMessage) -> None:
        assert self._host is not None
        node = member.hello.node
        member.silent_s = 0.0
        if message.beat is not None:
            self._send(node, pb.ControllerMessage(beat=message.beat))
        elif message.started is not None and (worker := message.started.worker) is not None:
            on = (worker.replica_id, worker.epoch)
            self._host.started(node, *on, worker.pid, worker.endpoint)
        elif (gone := message.exited) is not None:
            self._host.exited(node, gone.replica_id, gone.epoch, gone.reason)
        elif message.leaving is not None:
            await self._lose(member, message.leaving.reason)

    async def _expire(self, member: Member) -> None:
        """Ends with the lease. Time counts only as far as we were there to listen."""
        lease_s = self._config.lease_s
        tick_s = lease_s / 20
        while member.silent_s < lease_s:
            began = time.monotonic()
            await asyncio.sleep(tick_s)
            member.silent_s += min(time.monotonic() - began, 2 * tick_s)
        await self._lose(member, f"not heard of for {lease_s:g} s")

    async def _await(self, node: str, epoch: int) -> None:
        """Its own lease, which began before our start, is over by then."""
        assert self._host is not None
        lease_s = self._config.lease_s
        await asyncio.sleep(lease_s)
        del self._awaited[node]
        self._host.gave_up(node)
        reason = f"not back {lease_s:g} s after the controller's restart"
        log.warning("a node is lost", node=node, reason=reason)
        await self._post(ev.AgentLost(node, epoch, reason))

    async def _lose(self, member: Member, reason: str) -> None:
        node = member.hello.node
        if self._members.get(node) is not member:
            return
        del self._members[node]
        member.cut_off()
        if member.lease is not None and member.lease is not asyncio.current_task():
            member.lease.cancel()
        log.warning("a node is lost", node=node, reason=reason)
        await self._post(ev.AgentLost(node, member.hello.epoch, reason))


def _offer(hello: pb.Hello) -> tuple[object, ...]:
    return (hello.replica_ids, hello.roles, hello.model_path, hello.kv_blocks, hello.address)


def _joined(hello: pb.Hello) -> ev.AgentJoined:
    ids = (f"{hello.node}.{name}" for name in hello.replica_ids)
    return ev.AgentJoined(
        hello.node,
        hello.epoch,
        hello.address,
        hello.version,
        hello.arch,
        hello.cpus,
        hello.memory_mib,
        tuple(zip(ids, hello.roles, strict=True)),
    )
