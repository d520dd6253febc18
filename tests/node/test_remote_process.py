"""A worker's process behind an agent that hears, does not answer, or is out of contact."""

import asyncio
import signal
from collections.abc import Coroutine

import pytest

from blitzd.node import remote_process
from blitzd.node.remote_process import RemoteProcess
from blitzd.proto.blitzd.node import v1 as pb


class Agent:
    def __init__(self, in_contact: bool = True) -> None:
        self.in_contact = in_contact
        self.told: list[pb.ControllerMessage] = []
        self.exits: list[str] = []
        self.process = RemoteProcess(self.tell, "b.r0", 3, self.exits.append)

    def tell(self, message: pb.ControllerMessage) -> bool:
        if self.in_contact:
            self.told.append(message)
        return self.in_contact


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_process, "ANSWER_S", 0.05)


def run(talk: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(talk, 5))


def test_a_kill_is_told_once_and_ends_with_what_the_agent_says() -> None:
    async def talk() -> None:
        agent = Agent()
        for _ in range(2):
            agent.process.signal(signal.SIGKILL)
            await asyncio.sleep(0)
        [told] = agent.told
        assert told.end == pb.End(replica_id="b.r0", epoch=3, grace_ms=0)
        assert agent.process.alive
        agent.process.ended("killed by SIGKILL")
        await asyncio.sleep(0.1)
        assert agent.exits == ["killed by SIGKILL"]

    run(talk())


@pytest.mark.parametrize(
    ("in_contact", "how"),
    [(True, "its node does not answer"), (False, "its node is out of contact")],
)
def test_a_kill_that_nobody_answers_is_the_end_all_the_same(in_contact: bool, how: str) -> None:
    async def talk() -> None:
        agent = Agent(in_contact)
        agent.process.signal(signal.SIGKILL)
        await asyncio.sleep(0.2)
        assert agent.exits == [how]
        assert not agent.process.alive
        agent.process.ended("killed by SIGKILL")  # late
        assert len(agent.exits) == 1

    run(talk())


def test_a_start_that_is_not_heard_waits_for_the_next_hello() -> None:
    async def talk() -> None:
        agent = Agent(in_contact=False)
        agent.process.start()
        await asyncio.sleep(0.1)
        assert agent.process.alive
        agent.process.ended("not usable when its node was back in contact")
        assert len(agent.exits) == 1

    run(talk())


def test_other_signals_stay_here() -> None:
    async def talk() -> None:
        agent = Agent()
        agent.process.signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        assert (agent.told, agent.exits) == ([], [])

    run(talk())
