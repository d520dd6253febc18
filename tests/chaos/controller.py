"""A virtual node, and one life of a virtual controller as far as other nodes matter to it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from blitzd.control.agents import awaited
from blitzd.events.record import Payload
from blitzd.fsm import ClusterState
from blitzd.node.driver import Driver
from blitzd.proto.blitzd.engine import v1 as pb

LEASE_S = 5.0
BEATS = 5
ANSWER_S = 2.0
"""For an agent to say that a worker has ended."""
DYING_S = 0.2
"""Between the end of a worker's token stream and its being killed for that."""
ON_THE_WAY_S = 0.001
"""A beat. So an agent's lease is over first."""
DIGEST = "d"

Key = tuple[str, int]


@dataclass(eq=False)
class VirtualNode:
    name: str
    offers: tuple[tuple[str, str], ...]
    """(id, role)."""
    epoch: int = 1
    alive: bool = True
    """Its agent."""
    frozen: bool = False
    linked: bool = True
    """With the controller's network, which other nodes are on, too."""
    lease_until: float | None = None
    since: float = 0.0
    """When this agent was started."""
    contact: "Controller | None" = None

    @property
    def works(self) -> bool:
        return self.alive and not self.frozen and self.linked


@dataclass(eq=False)
class Controller:
    """What one life of the controller knows of other nodes: its hub and its pool."""

    driver: Driver
    post: Callable[[Payload], Awaitable[None]]
    heard: dict[str, float] = field(default_factory=dict)
    """By node that holds a lease: when it was last heard of."""
    epochs: dict[str, int] = field(default_factory=dict)
    awaited: dict[str, float] = field(default_factory=dict)
    """By node: until when."""
    expected: dict[str, set[Key]] = field(default_factory=dict)
    known: dict[Key, str] = field(default_factory=dict)
    """Workers of other nodes, and their node."""
    mute: set[Key] = field(default_factory=set)
    """Those that were found, and are not reset and watched yet."""

    def hears(self, key: Key) -> bool:
        """Without a channel and a watch, what a worker says goes nowhere."""
        return key not in self.mute and ("." not in key[0] or key in self.known)

    def expect(self, state: ClusterState, now: float) -> None:
        for agent in [a for a in state.agents.values() if a.phase != "lost"]:
            self.awaited[agent.node] = now + LEASE_S
            self.epochs[agent.node] = agent.epoch
            here = [r for r in awaited(state) if r.node == agent.node]
            self.expected[agent.node] = {(r.id, r.epoch) for r in here}


class Wire:
    """What reaches whoever is the controller now. Nobody hears what is said to none."""

    def __init__(self) -> None:
        self.controller: Controller | None = None
        self.reach: Callable[[str, int], Awaitable[None]] | None = None

    async def post(self, payload: Payload) -> None:
        if self.controller is not None:
            await self.controller.driver.post(payload)

    async def deliver(self, replica: str, epoch: int, report: pb.StepReport) -> None:
        assert self.reach is not None
        life = self.controller
        await self.reach(replica, epoch)
        if life is not None and life is self.controller and life.hears((replica, epoch)):
            await life.driver.deliver(replica, epoch, report)

    @property
    def last_turn_ns(self) -> int:
        return 0 if self.controller is None else self.controller.driver.last_turn_ns
