"""When a worker is asked whether it lives."""

import asyncio

from blitzd.node.health_watch import HealthWatch
from blitzd.proto.blitzd.engine import v1 as pb

SILENCE_S = 0.4
PERIOD_S = SILENCE_S / 4


class Asked:
    def __init__(self) -> None:
        self.times = 0
        self.answers = True
        self.fails = False

    async def __call__(self) -> pb.HealthReply:
        self.times += 1
        if self.fails:
            raise ConnectionRefusedError
        if not self.answers:
            await asyncio.Event().wait()
        return pb.HealthReply(step=self.times)


async def reports(watch: HealthWatch, seconds: float) -> None:
    """Steps, several in a period."""
    ends = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < ends:
        watch.heard()
        await asyncio.sleep(PERIOD_S / 10)


def test_who_reports_steps_is_not_asked_and_who_stops_is_asked_and_given_up() -> None:
    async def talk() -> None:
        asked = Asked()
        watch = HealthWatch(asked, SILENCE_S, 60.0)
        failure = asyncio.create_task(watch.failure())
        await reports(watch, 8 * PERIOD_S)
        assert asked.times == 1, "once, at the start"
        await reports(watch, 14 * PERIOD_S)
        assert asked.times in (2, 3), "but what it holds is asked for now and then"
        await asyncio.sleep(6 * PERIOD_S)
        assert asked.times > 4 and not failure.done()
        asked.answers = False
        async with asyncio.timeout(10.0):
            assert (await failure).startswith("silent for 0.4 s")

    asyncio.run(talk())


def test_what_fails_at_once_is_asked_again_a_period_later() -> None:
    async def talk() -> None:
        asked = Asked()
        asked.fails = True
        async with asyncio.timeout(10.0):
            failure = await HealthWatch(asked, SILENCE_S, 60.0).failure()
        assert failure == "silent for 0.4 s: ConnectionRefusedError"
        assert 3 <= asked.times <= 5

    asyncio.run(talk())
