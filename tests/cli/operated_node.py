"""A node whose decisions are real and whose workers do what a test says."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from blitzd.events import types as ev
from blitzd.events.json_form import record_json
from blitzd.events.record import Payload
from blitzd.node.daemon import STATUS_OF_REFUSAL
from blitzd.node.face import CommandFailed, OperatorCommand
from blitzd.node.operator import input_of
from tests.control.harness import Harness
from tests.http.scripted_node import ScriptedNode
from tests.http.served import Served


class OperatedNode(ScriptedNode):
    def __init__(self, *roles: str) -> None:
        super().__init__()
        self.world = Harness().serving(*roles)
        self.records = [record_json(record) for record in self.world.log]

    def feed(self, *payloads: Payload) -> None:
        for payload in payloads:
            self.world.feed(payload)
        self._publish()

    def act(self, work: Callable[[Harness], Any]) -> None:
        work(self.world)
        self._publish()

    def _publish(self) -> None:
        self.records += [record_json(r) for r in self.world.log[len(self.records) :]]
        self.new_record.set()

    def state(self) -> dict[str, Any]:
        return self.world.state.to_json() | {"now_ns": self.world.now}

    async def command(self, command: OperatorCommand) -> list[dict[str, Any]]:
        self.commands.append(command)
        seq = len(self.records)
        self.feed(input_of(command, self.world.now))
        for record in self.world.log[seq:]:
            refused = record.payload
            if isinstance(refused, ev.CommandRefused):
                status = STATUS_OF_REFUSAL[refused.code]
                raise CommandFailed(refused.reason, status=status, code=refused.code)
        return self.records[seq + 1 :]


def soon(server: Served, work: Callable[[], Any], after_s: float = 0.2) -> threading.Timer:
    """In the server's loop, when the verb already waits."""
    timer = threading.Timer(after_s, lambda: asyncio_call(server, work))
    timer.start()
    return timer


def asyncio_call(server: Served, work: Callable[[], Any]) -> None:
    done = threading.Event()

    def run() -> None:
        try:
            work()
        finally:
            done.set()

    loop: asyncio.AbstractEventLoop = server.loop
    loop.call_soon_threadsafe(run)
    assert done.wait(10)
