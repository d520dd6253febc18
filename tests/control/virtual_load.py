"""A core under load in its own time: replicas that take exactly as long as they are told.

A heap of what is due next; no threads, no event loop, so that a property test can run hours.
"""

import heapq
from collections.abc import Callable
from itertools import count

from blitzd.control import commands as cmd
from blitzd.events import types as ev
from blitzd.events.record import Payload
from tests.control.harness import Harness

S = 10**9
TICK_NS = S // 20
BLOCKS = 64


class VirtualLoad:
    def __init__(
        self,
        world: Harness,
        *,
        prefill_rate: int = 1000,
        load_s: float = 1.0,
        decode_s: float = 1.0,
    ) -> None:
        self.world = world
        self.prefill_rate = prefill_rate
        self.load_ns, self.decode_ns = int(load_s * S), int(decode_s * S)
        self.events: list[tuple[int, Payload]] = []
        """What was decided, with its time."""
        self._due: list[tuple[int, int, Callable[[], Payload | None]]] = []
        self._order = count()
        self._free_ns: dict[str, int] = {}
        """When a prefill replica will have computed all that it was given."""
        self._requests = count(1)

    def at(self, when_ns: int, happens: Callable[[], Payload | None]) -> None:
        heapq.heappush(self._due, (when_ns, next(self._order), happens))

    def arrivals(
        self, since_s: float, until_s: float, per_s: float, prompt: int, max_tokens: int = 64
    ) -> None:
        for number in range(int((until_s - since_s) * per_s)):
            request_id = next(self._requests)
            when = int((since_s + number / per_s) * S)
            self.at(when, lambda i=request_id: ev.RequestArrived(i, prompt, max_tokens, 0, 0))

    def run(self, until_s: float) -> None:
        self.at(self.world.now + TICK_NS, self._tick)
        while self._due and self._due[0][0] <= until_s * S:
            when, _, happens = heapq.heappop(self._due)
            self.world.now = max(self.world.now, when)
            payload = happens()
            if payload is None:
                continue
            step = self.world.core.step(payload, self.world.now, 0)
            assert step.fault is None, step.fault
            self.world.log += step.records
            self.events += [(self.world.now, r.payload) for r in step.records]
            for command in step.commands:
                self._perform(command)

    def _tick(self) -> Payload:
        self.at(self.world.now + TICK_NS, self._tick)
        return ev.Ticked()

    def _perform(self, command: cmd.Command) -> None:
        now = self.world.now
        match command:
            case cmd.SpawnWorker(replica, epoch):
                described = ev.WorkerDescribed(replica, epoch + 1, 1)
                self.at(now + S // 10, lambda: described)
            case cmd.LoadModel(replica, epoch):
                loaded = ev.LoadEnded(replica, epoch, "d", "map", 4, 40, 64, BLOCKS)
                self.at(now + self.load_ns, lambda: loaded)
            case cmd.StartPrefill(replica, epoch, request_id):
                request = self.world.state.requests[request_id]
                takes = request.prompt_tokens * S // self.prefill_rate
                self._free_ns[replica] = max(now, self._free_ns.get(replica, 0)) + takes
                first = ev.FirstTokenProduced(replica, epoch, request_id)
                self.at(self._free_ns[replica], lambda: first)
            case cmd.ImportKv(lease_id, request_id, _, _, target, epoch):
                self.at(now + S // 100, lambda: ev.ImportEnded(lease_id, 1000, 10))
                ended = ev.GenerationEnded(target, epoch, request_id, "stop", 5, "00")
                self.at(now + S // 100 + self.decode_ns, lambda: ended)

    # What came of it.

    def counts(self, role: str) -> list[tuple[int, int]]:
        """(time, wanted) of each plan that changed the wanted count of a role."""
        found: list[tuple[int, int]] = []
        for when, event in self.events:
            if isinstance(event, ev.PlanDecided):
                wanted = getattr(event, f"wanted_{role}")
                if not found or found[-1][1] != wanted:
                    found.append((when, wanted))
        return found

    def turns(self, role: str, start: int) -> list[int]:
        """When the wanted count changed its direction, first change not counted."""
        turned, direction, last = [], 0, start
        for when, wanted in self.counts(role):
            now = (wanted > last) - (wanted < last)
            if direction and now and now != direction:
                turned.append(when)
            direction, last = now or direction, wanted
        return turned
