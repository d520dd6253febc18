"""A core with a clock of its own, for tests that feed it inputs."""

from typing import TypeVar

from blitzd.control.commands import Command
from blitzd.control.core import CORE_VERSION, Core
from blitzd.control.policy import Policy
from blitzd.events import types as ev
from blitzd.events.record import Kind, Payload, Record
from blitzd.fsm import ClusterState, Replica, ReplicaState, RequestState, fold
from blitzd.fsm.invariants import violations

MS = 1_000_000
BLOCKS = 64

PayloadT = TypeVar("PayloadT", bound=Payload)
CommandT = TypeVar("CommandT", bound=Command)


class Harness:
    def __init__(self, **policy: int) -> None:
        self.core = Core(ClusterState())
        self.policy = Policy(**policy)
        self.topology: tuple[ev.NodeLinks, ...] = ()
        """Of boots to come."""
        self.boots = 0
        self.now = 0
        self.sent: dict[int, int] = {}
        """Output tokens that clients have got."""
        self._followed = ClusterState()
        self.log: list[Record] = []
        self.commands: list[Command] = []
        """Of the last input."""

    @property
    def state(self) -> ClusterState:
        return self.core.state

    def feed(self, payload: Payload) -> list[Payload]:
        """The events that came of it. Fails when the fold refused a decision, or a state
        between two of the events does not keep the invariants."""
        step = self.core.step(payload, self.now, 0, lambda id: self.sent.get(id, 0))
        assert step.fault is None, step.fault
        for record in step.records:
            fold(self._followed, record)
            assert violations(self._followed) == [], record
        self.log += step.records
        self.commands = step.commands
        return [r.payload for r in step.records if r.payload.kind is Kind.EVENT]

    def after(self, ms: int) -> list[Payload]:
        self.now += ms * MS
        return self.feed(ev.Ticked())

    def commanded(self, kind: type[CommandT]) -> list[CommandT]:
        return [c for c in self.commands if isinstance(c, kind)]

    def replica(self, replica_id: str) -> Replica:
        return self.state.replicas[replica_id]

    def request_state(self, request_id: int) -> RequestState:
        return self.state.requests[request_id].state

    # Shortcuts through a life.

    def boot(self, *roles: str, adopted: tuple[tuple[str, int, int], ...] = ()) -> list[Payload]:
        replicas = tuple((f"r{i}", role) for i, role in enumerate(roles))
        self.boots += 1
        policy = self.policy.pairs()
        return self.feed(
            ev.Booted(
                self.boots, "test", "local", replicas, policy, CORE_VERSION, adopted, self.topology
            )
        )

    def attach(self, replica_id: str, pid: int = 100) -> list[Payload]:
        epoch = self.replica(replica_id).epoch
        self.feed(ev.WorkerStarted(replica_id, epoch, pid))
        return self.feed(ev.WorkerDescribed(replica_id, epoch, pid))

    def load(self, replica_id: str, blocks: int = BLOCKS) -> list[Payload]:
        epoch = self.replica(replica_id).epoch
        return self.feed(ev.LoadEnded(replica_id, epoch, "digest", "map", 30, 1000, 64, blocks))

    def moved(self, replica_id: str, layers: int = 1, blocks: int = BLOCKS) -> list[Payload]:
        """Of a load by one that serves meanwhile: the first makes it take prompts."""
        epoch = self.replica(replica_id).epoch
        progress = (layers, 30, layers * 30, 1000)
        return self.feed(ev.LoadMoved(replica_id, epoch, *progress, "", 64, blocks))

    def serving(self, *roles: str, blocks: int = BLOCKS) -> "Harness":
        self.boot(*roles)
        for replica_id, replica in self.state.replicas.items():
            self.attach(replica_id, pid=100 + int(replica_id[1:]))
            if replica.role != "spare":
                self.load(replica_id, blocks)
        return self

    def arrive(self, request_id: int, prompt: int = 100, max_tokens: int = 64) -> list[Payload]:
        return self.feed(ev.RequestArrived(request_id, prompt, max_tokens, 7, 0))

    def first_token(self, request_id: int) -> list[Payload]:
        on = self.state.requests[request_id].runner
        return self.feed(ev.FirstTokenProduced(*on, request_id))

    def relayed(self, request_id: int, layers: int, by: str = "") -> list[Payload]:
        """As the source says, or `by`."""
        request = self.state.requests[request_id]
        by = by or request.source
        on = (by, self.replica(by).epoch)
        return self.feed(ev.Relayed(*on, request_id, request.resumes, layers))

    def followed(self, pair_id: int, fault: str = "") -> list[Payload]:
        pair = self.state.pairs[pair_id]
        reason = "peer was lost" if fault else ""
        return self.feed(ev.FollowEnded(pair_id, pair.old, pair.old_epoch, 0, fault, reason))

    def imported(self, request_id: int) -> list[Payload]:
        lease = self.state.requests[request_id].lease_id
        return self.feed(ev.ImportEnded(lease, 1000, 10))

    def ended(self, request_id: int) -> list[Payload]:
        request = self.state.requests[request_id]
        on = (request.target, request.target_epoch)
        if not request.target:
            on = request.runner
        return self.feed(ev.GenerationEnded(*on, request_id, "stop", 5, "00"))


def refold(log: list[Record]) -> ClusterState:
    state = ClusterState()
    for record in log:
        fold(state, record)
    return state


def only(events: list[Payload], kind: type[PayloadT]) -> PayloadT:
    [event] = [e for e in events if isinstance(e, kind)]
    return event


__all__ = ["Harness", "ReplicaState", "RequestState", "only", "refold"]
