"""From the step loop to its watcher: in order, bounded, and never silently short."""

import asyncio

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from blitzd.engine.reports import BACKLOG, Reports
from blitzd.proto.blitzd.engine import v1 as pb

FIRST = pb.StepReport(step=7)


def test_a_watcher_gets_the_first_report_at_once_and_then_all_in_order() -> None:
    async def test() -> None:
        reports = Reports()
        reports.publish(pb.StepReport(step=1))
        watcher = reports.watch(FIRST)
        assert (await anext(watcher)).step == 7, "what came before it is gone"
        for step in (8, 9):
            reports.publish(pb.StepReport(step=step))
        assert [(await anext(watcher)).step for _ in range(2)] == [8, 9]
        assert reports.watched
        await watcher.aclose()
        assert not reports.watched

    asyncio.run(test())


def test_a_watcher_that_falls_behind_is_told_so_and_loses_nothing_before_that() -> None:
    async def test() -> None:
        reports = Reports()
        watcher = reports.watch(FIRST)
        await anext(watcher)
        for step in range(BACKLOG + 1):
            reports.publish(pb.StepReport(step=step))
        assert not reports.watched
        assert [(await anext(watcher)).step for _ in range(BACKLOG)] == list(range(BACKLOG))
        with pytest.raises(GRPCError, match=f"{BACKLOG} reports behind") as caught:
            await anext(watcher)
        assert caught.value.status is Status.RESOURCE_EXHAUSTED

    asyncio.run(test())


def test_a_watcher_that_was_replaced_does_not_unseat_its_successor_when_it_ends() -> None:
    async def test() -> None:
        reports = Reports()
        old, new = reports.watch(FIRST), reports.watch(FIRST)
        await anext(old)
        await anext(new)
        with pytest.raises(GRPCError) as caught:
            await anext(old)
        assert caught.value.status is Status.ABORTED
        reports.publish(pb.StepReport(step=8))
        assert (await anext(new)).step == 8

    asyncio.run(test())
