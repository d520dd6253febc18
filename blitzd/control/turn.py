"""One turn of the core: an input, the events it leads to, the commands that follow.

Events are folded as they are decided, so that a later decision of the same turn sees what
an earlier one did.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from blitzd.control.commands import Command
from blitzd.control.policy import Policy
from blitzd.events.record import Payload, Record
from blitzd.events.types import StaleNoticeIgnored
from blitzd.fsm import ClusterState, Replica, fold

MS = 1_000_000
"""Nanoseconds."""


@dataclass(slots=True)
class Turn:
    state: ClusterState
    trigger: Payload
    mono_ns: int
    wall_ns: int
    policy: Policy
    sent: Callable[[int], int]
    """Output tokens that a request's client has got. The driver knows, and no input before;
    what a decision rested on is in its event."""
    records: list[Record] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def emit(self, event: Payload) -> None:
        """Folds `event` and queues it for the log, its input before it.

        Raises IllegalEvent or IllegalTransition if the decision was wrong; the state is
        then as it was.
        """
        if not self.records:
            self._record(self.trigger, cause=0)
        self._record(event, cause=self.records[0].seq)

    def _record(self, payload: Payload, cause: int) -> None:
        record = Record(self.state.seq + 1, self.wall_ns, self.mono_ns, cause, payload)
        fold(self.state, record)
        self.records.append(record)

    def command(self, command: Command) -> None:
        self.commands.append(command)

    def current(self, replica_id: str, epoch: int) -> Replica | None:
        """The replica if the notice is about its living worker; else the notice is counted
        and there is nothing more to do."""
        replica = self.state.replicas.get(replica_id)
        if replica is not None and replica.epoch == epoch and replica.worker != "absent":
            return replica
        self.ignore(replica_id, epoch)
        return None

    def ignore(self, replica_id: str, epoch: int) -> None:
        self.emit(StaleNoticeIgnored(type(self.trigger).__name__, replica_id, epoch))
