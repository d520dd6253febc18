"""The service manager's notification protocol (sd_notify(3)): ready, status, watchdog.

A datagram of `NAME=value` lines to the socket that $NOTIFY_SOCKET names. Nothing is sent, and
nothing fails, where there is no manager.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import MutableMapping
from dataclasses import dataclass

import structlog

from blitzd.fsm import ClusterState, Replica
from blitzd.fsm.table import LOADING, WITHOUT_WEIGHTS
from blitzd.node.agent import Agent
from blitzd.node.daemon import NodeDaemon

SEND_S = 0.1
"""The manager's socket has room unless the manager is stuck."""
STATUS_S = 1.0
STATUS_BYTES = 500
EXTENSION_S = 20.0
"""Asked for again every second while a drain goes on. The last one covers what comes after
it: workers end within 3 s, the last responses within 10 s."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Manager:
    address: str | None
    """Of its socket: a path, or @name in the abstract namespace."""
    watchdog_s: float | None
    """It ends the daemon when no WATCHDOG=1 has come for so long."""

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> "Manager":
        """Takes the variables out of `environment`: they are not about our children."""
        address = environment.pop("NOTIFY_SOCKET", "")
        period = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "")
        watched = period.isdecimal() and int(period) and pid in ("", str(os.getpid()))
        return cls(
            address if address[:1] in ("/", "@") and len(address) > 1 else None,
            int(period) / 1e6 if watched else None,
        )

    def tell(self, *lines: str) -> None:
        if self.address is None:
            return
        address = self.address
        where = f"\0{address[1:]}" if address.startswith("@") else address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(SEND_S)
            try:
                sender.sendto("\n".join(lines).encode(), where)
            except OSError as error:
                log.error("the service manager cannot be told", socket=address, reason=str(error))

    async def attend(self, daemon: NodeDaemon) -> None:
        """Keeps the manager informed until it is cancelled."""
        if self.address is None:
            return
        period_s = min(STATUS_S, (self.watchdog_s or STATUS_S) / 4)
        told, turned_ns = "", 0
        while True:
            lines = []
            if (status := status_line(daemon.core.state)) != told:
                told = status
                lines.append(f"STATUS={status}")
            if daemon.driver.last_turn_ns != turned_ns:
                # An idle driver turns twice a second. One that is stuck is not helped by an
                # event loop that still runs: the manager is to end it.
                turned_ns = daemon.driver.last_turn_ns
                if self.watchdog_s is not None:
                    lines.append("WATCHDOG=1")
                if daemon.core.state.node.phase == "draining":
                    lines.append(f"EXTEND_TIMEOUT_USEC={EXTENSION_S * 1e6:.0f}")
            if lines:
                self.tell(*lines)
            await asyncio.sleep(period_s)

    async def attend_agent(self, agent: Agent) -> None:
        """The same, of an agent: its event loop is all that it has."""
        if self.address is None:
            return
        told = ""
        while True:
            status = f"{'in' if agent.in_contact else 'out of'} contact with the controller"
            lines = [f"STATUS={status}"] if status != told else []
            told = status
            if self.watchdog_s is not None:
                lines.append("WATCHDOG=1")
            if lines:
                self.tell(*lines)
            await asyncio.sleep(min(STATUS_S, (self.watchdog_s or STATUS_S) / 4))


def status_line(state: ClusterState) -> str:
    """For `systemctl status`: what serves, what runs, what is wrong."""
    wanted = Counter(replica.role for replica in state.replicas.values())
    there = Counter(replica.role for replica in state.replicas.values() if _serves(replica))
    counts = (
        f"{there[role]} {role}" if there[role] == count else f"{there[role]} of {count} {role}"
        for role, count in wanted.items()
    )
    running = len(state.requests)
    line = f"{', '.join(counts)}; {running} request{'' if running == 1 else 's'}"
    if state.node.phase == "draining":
        line = f"draining: {line}"
    troubles = [f"{r.id}: {r.trouble}" for r in state.replicas.values() if r.trouble]
    # A datagram's line; reasons may come from anywhere.
    return " ".join("; ".join([line, *troubles]).split())[:STATUS_BYTES]


def _serves(replica: Replica) -> bool:
    if replica.role == "spare":
        return replica.worker == "attached"
    return replica.state not in WITHOUT_WEIGHTS and replica.state not in LOADING
