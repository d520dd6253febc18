"""The core: `step(input)` decides, folds, and hands out records to log and commands to
carry out. The driver appends the records, then performs the commands, then feeds results
back as inputs (after etcd-io/raft's Ready loop).

Pure: the clock and all randomness come in with the input, so that a recorded input
decides again as it did.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from blitzd.control import (
    agents,
    audit,
    handoff,
    host_cache,
    host_pool,
    leases,
    pairs,
    planner,
    replicas,
    requests,
    restarts,
    roles,
    scaling,
)
from blitzd.control.commands import Command, EndWorker, ShutDown
from blitzd.control.policy import Policy
from blitzd.control.resume import fail
from blitzd.control.turn import Turn
from blitzd.events import types as ev
from blitzd.events.record import Payload, Record
from blitzd.fsm import ClusterState

CORE_VERSION = 3
"""Raised with every change of a decision, and a log of the version before goes to the test
corpus: it is folded from then on, not decided again."""

HASH_EVERY = 1000
"""Records between two hashes of the state in the log."""


class Step(NamedTuple):
    records: list[Record]
    """To be appended before any command is performed. Empty when nothing came of it."""
    commands: list[Command]
    fault: Exception | None = None
    """A decision that the fold refused, or that broke: a defect of ours. What was decided before
    it stands and must be logged; the daemon lives on."""


def _booted(turn: Turn, boot: ev.Booted) -> None:
    replicas.booted(turn, boot)
    agents.retire_others(turn)
    pairs.restarted(turn)
    agents.await_nodes(turn)


def _ticked(turn: Turn, _: ev.Ticked) -> None:
    leases.expire(turn)
    requests.expire(turn)
    roles.expire(turn)
    host_cache.expire(turn)


def _stop_requested(turn: Turn, stop: ev.StopRequested) -> None:
    node = turn.state.node
    sooner = node.phase == "draining" and stop.deadline_ns < node.drain_deadline_ns
    if node.phase == "running" or sooner:
        turn.emit(ev.NodeDraining(stop.reason, stop.deadline_ns))


HANDLERS: dict[type[Payload], Callable[[Turn, Any], None]] = {
    ev.Booted: _booted,
    ev.WorkerStarted: replicas.worker_started,
    ev.WorkerDescribed: replicas.worker_described,
    ev.WorkerExited: replicas.worker_exited,
    ev.LoadMoved: replicas.load_moved,
    ev.LoadEnded: replicas.load_ended,
    ev.OccupancyReported: replicas.occupancy_reported,
    ev.RequestArrived: requests.request_arrived,
    ev.ClientLeft: requests.client_left,
    ev.FirstTokenProduced: requests.first_token_produced,
    ev.DecodeHeld: handoff.decode_held,
    ev.ImportProgressed: leases.import_progressed,
    ev.ImportEnded: leases.import_ended,
    ev.HoldingsReported: audit.holdings_reported,
    ev.StateAudited: audit.state_audited,
    ev.GenerationEnded: requests.generation_ended,
    ev.RequestErrored: requests.request_errored,
    ev.TokensOutdated: requests.tokens_outdated,
    ev.Ticked: _ticked,
    ev.StopRequested: _stop_requested,
    ev.DrainRequested: roles.drain_requested,
    ev.UndrainRequested: roles.undrain_requested,
    ev.RoleRequested: roles.role_requested,
    ev.DeactivateRequested: roles.deactivate_requested,
    ev.LivePairRequested: roles.live_pair_requested,
    ev.Relayed: pairs.relayed,
    ev.FollowEnded: pairs.follow_ended,
    ev.ScaleRequested: scaling.scale_requested,
    ev.RemoveRequested: scaling.remove_requested,
    ev.ReleaseRequested: planner.release_requested,
    ev.RestartRequested: restarts.restart_requested,
    ev.RollingRestartRequested: restarts.rolling_restart_requested,
    ev.RollingRestartStopRequested: restarts.rolling_restart_stop_requested,
    ev.PolicyRequested: roles.policy_requested,
    ev.PoolCopyEnded: host_pool.copy_ended,
    ev.AgentJoined: agents.agent_joined,
    ev.AgentLost: agents.agent_lost,
    ev.WorkerFound: agents.worker_found,
}


class Core:
    """The only owner of the state while the daemon runs."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self._values: dict[str, int] | None = None
        self._policy = Policy()

    @property
    def policy(self) -> Policy:
        """As it is now."""
        # The fold puts another one in its place and never changes it; and every turn asks.
        values = self.state.node.policy
        if values is not self._values:
            self._values, self._policy = values, Policy.of(values)
        return self._policy

    def step(
        self,
        payload: Payload,
        mono_ns: int,
        wall_ns: int,
        sent: Callable[[int], int] = lambda request_id: 0,
    ) -> Step:
        """`mono_ns` must not be less than the last one's of the same boot. `sent` tells how
        many output tokens of a request its client has got.

        Raises KeyError for a payload that is no input.
        """
        policy = self.policy
        if isinstance(payload, ev.Booted):
            policy = Policy.of(dict(payload.policy))
        decide = HANDLERS[type(payload)]
        turn = Turn(self.state, payload, mono_ns, wall_ns, policy, sent)
        hashed = self.state.seq // HASH_EVERY
        fault: Exception | None = None
        try:
            decide(turn, payload)
            planner.plan(turn)
            scaling.scale(turn)
            roles.settle(turn)
            replicas.tend(turn)
            host_pool.tend(turn)
            pairs.tend(turn)
            handoff.move(turn)
            leases.dispatch(turn)
            requests.dispatch(turn)
            _drain(turn)
        except Exception as error:
            fault = error
        if self.state.seq // HASH_EVERY > hashed:
            turn.emit(ev.StateHashed(self.state.hash()))
        return Step(turn.records, turn.commands, fault)


def _drain(turn: Turn) -> None:
    """Stops the node once nothing is left to serve, or its deadline has come."""
    node = turn.state.node
    if node.phase != "draining":
        return
    reason = "drained"
    if turn.state.requests and turn.mono_ns >= node.drain_deadline_ns:
        reason = f"{len(turn.state.requests)} requests were cut off"
        for request in list(turn.state.requests.values()):
            fail(turn, request, "shutdown", "the server stopped before it could finish")
    if turn.state.requests:
        return
    for replica in turn.state.replicas.values():
        if replica.worker != "absent":
            turn.command(EndWorker(replica.id, replica.epoch))
            replicas.break_pair(turn, replica, "the server stopped")
            turn.emit(ev.WorkerLost(replica.id, replica.epoch, "the server stopped", 0))
    turn.emit(ev.NodeStopped(reason))
    turn.command(ShutDown())
