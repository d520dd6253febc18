"""Holds the state against its invariants while nothing runs."""

from collections.abc import Awaitable, Callable

import anyio
import structlog

from blitzd.control.core import Core
from blitzd.events import types as ev
from blitzd.events.record import Payload
from blitzd.fsm.invariants import violations

PERIOD_S = 10.0
"""A few milliseconds of work with a hundred replicas, while nobody waits for an answer."""
PROBLEMS = 8
"""That are recorded; one defect can break the invariants of every replica."""

log = structlog.get_logger()


async def audit_when_idle(core: Core, post: Callable[[Payload], Awaitable[None]]) -> None:
    """Once for each time that nothing runs. What is broken becomes an input, for the log."""
    audited = 0
    while True:
        await anyio.sleep(PERIOD_S)
        if core.state.requests or core.state.seq == audited:
            continue
        problems = violations(core.state)
        if problems:
            log.error("the state breaks its invariants", problems=problems)
            await post(ev.StateAudited(tuple(problems[:PROBLEMS])))
        audited = core.state.seq
