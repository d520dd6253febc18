"""The idle audit: a worker that serves no request must hold nothing.

Workers say with every answer to Health what they hold. For one without requests in the state
that is nothing, but for the moment that a release takes, and for connections to peers that
live, or may for all that its node can know. What is still there after `audit_grace_ms` has
leaked, and is taken back: requests that the worker names are cancelled; if that does not
help, the worker is replaced, which costs nobody a request, since it has none.
"""

from blitzd.control import pairs
from blitzd.control.commands import CancelRequest, EndWorker
from blitzd.control.replicas import lose
from blitzd.control.turn import MS, Turn
from blitzd.events import types as ev
from blitzd.fsm import Replica


def holdings_reported(turn: Turn, report: ev.HoldingsReported) -> None:
    replica = turn.current(report.replica, report.epoch)
    if replica is None or not replica.blocks_total:
        return
    pairs.lost_on_the_way(turn, replica, report)
    on = (replica.id, replica.epoch)
    findings = "" if turn.state.requests_on(replica.id) else _findings(turn, report)
    if not findings:
        if replica.dirty_ns:
            turn.emit(ev.AuditPassed(*on))
    elif not replica.dirty_ns:
        turn.emit(ev.AuditOpened(*on, findings))
    elif turn.mono_ns >= replica.dirty_ns + turn.policy.audit_grace_ms * MS:
        _take_back(turn, replica, report, findings)


def _take_back(turn: Turn, replica: Replica, report: ev.HoldingsReported, findings: str) -> None:
    on = (replica.id, replica.epoch)
    strangers = dict.fromkeys((*report.held, *report.exports))
    if strangers and not replica.audits_failed:
        turn.emit(ev.AuditFailed(*on, findings, "cancel"))
        for request_id, attempt in strangers:
            turn.command(CancelRequest(*on, request_id, attempt))
        return
    turn.emit(ev.AuditFailed(*on, findings, "restart"))
    turn.command(EndWorker(*on))
    lose(turn, replica, f"it leaked {findings}")


def _findings(turn: Turn, report: ev.HoldingsReported) -> str:
    """What it holds, in words; empty: nothing that it may not."""
    found = []
    for count, what in (
        (report.blocks, "KV blocks"),
        (len(report.held), "requests"),
        (len(report.exports), "exports"),
        (report.transfers, "transfers"),
        (report.buffers, "UCX buffers"),
    ):
        if count:
            found.append(f"{count} {what}")
    here = turn.state.replicas[report.replica].node
    dead = [peer for peer in report.peers if not _lives(turn, peer, here)]
    if dead:
        found.append(f"connections to {', '.join(dead)}")
    return "; ".join(found)


def _lives(turn: Turn, peer: str, here: str) -> bool:
    """As far as whoever is on the node `here` can know: when another machine goes dark, nothing
    ends the connections to it, and no worker is to blame."""
    replica_id, _, epoch = peer.rpartition("/")
    replica = turn.state.replicas.get(replica_id)
    there = turn.state.node.name if replica is None else replica.node
    if (node := replica_id.rpartition(".")[0]) in turn.state.agents:
        there = node
    if there != here:
        return True
    return replica is not None and replica.worker != "absent" and str(replica.epoch) == epoch


def state_audited(turn: Turn, audited: ev.StateAudited) -> None:
    for problem in audited.problems:
        turn.emit(ev.InvariantBroken(problem))
