"""An operator's command on its way through the driver's inbox, and the answer to it."""

import anyio

from blitzd.control.core import Step
from blitzd.events.record import Payload, Record
from blitzd.node.face import CommandFailed


class Asked:
    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self._records: list[Record] = []
        self._failure: CommandFailed | None = None
        self._answered = anyio.Event()

    def decided(self, step: Step, read_only: str) -> None:
        """After the turn, its sync and its commands. `read_only`: why it is not on disk."""
        if step.fault is not None:
            self.fail(f"the decision failed: {step.fault!r}", "defect", status=500)
        elif read_only and step.records:
            self.fail(
                f"decided, but the event log takes no records ({read_only}): it takes effect"
                " when the log does, and is gone if the daemon ends before",
                "read_only",
            )
        else:
            self._records = step.records
            self._answered.set()

    def fail(self, reason: str, code: str, status: int = 503) -> None:
        self._failure = CommandFailed(reason, status=status, code=code)
        self._answered.set()

    async def answer(self) -> list[Record]:
        """The turn's records; none if there was nothing to do. Raises CommandFailed."""
        await self._answered.wait()
        if self._failure is not None:
            raise self._failure
        return self._records
