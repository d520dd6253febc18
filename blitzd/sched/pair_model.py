"""A live pair in discrete events: what each policy makes of one load.

Time is integer ns. New gets its layers at given times; requests arrive in order; a layer of a
request costs the same on both replicas. Activations and KV move in no time, as in BlitzScale's
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from blitzd.sched.zigzag import (
    NO_TARGETS,
    Policy,
    Waiting,
    best_effort_for_old,
    best_effort_on_new,
    next_for_old,
    next_on_new,
)


@dataclass(frozen=True, slots=True)
class Arrival:
    at_ns: int
    layer_ns: int
    """Time of one of its layers, the whole batch of its tokens."""
    done: int = 0
    """Layers executed on New before the model begins."""


@dataclass(frozen=True, slots=True)
class Pair:
    ready_ns: tuple[int, ...]
    """When New has each layer and all before it, embedding included; ascending."""
    arrivals: tuple[Arrival, ...]
    """In order of arrival."""
    old_free_ns: int = 0
    """Old is busy until then."""
    new_free_ns: int = 0
    cap: Callable[[int], int] | None = None
    """Requests pending on New by time since the load began at 0; None: any number."""

    def __post_init__(self) -> None:
        if not self.ready_ns or list(self.ready_ns) != sorted(self.ready_ns):
            raise ValueError("ready_ns: one time a layer is needed, ascending")
        if any(a.at_ns > b.at_ns for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)):
            raise ValueError("arrivals: must be in order of at_ns")
        for index, one in enumerate(self.arrivals):
            if one.layer_ns < 1 or not 0 <= one.done <= len(self.ready_ns):
                raise ValueError(f"arrivals[{index}]: {one}: layer_ns from 1, done from 0 to L")

    @property
    def layers(self) -> int:
        return len(self.ready_ns)

    @property
    def loaded_ns(self) -> int:
        return self.ready_ns[-1]


@dataclass(frozen=True, slots=True)
class Run:
    """Layers [first, last) of one request, without a pause."""

    on_new: bool
    request: int
    first: int
    last: int
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class Outcome:
    finish_ns: list[int]
    runs: list[Run]
    stall_ns: int = 0
    """Old's idle time, after its first request, while a request waited before the end of the
    load."""
    early: int = 0
    """Requests that Old took short of their target."""

    def ttft_ns(self, pair: Pair) -> list[int]:
        return [end - one.at_ns for end, one in zip(self.finish_ns, pair.arrivals, strict=True)]

    def splits(self, layers: int) -> list[int]:
        """Layers that New ran of each request."""
        here = [0] * len(self.finish_ns)
        for run in self.runs:
            here[run.request] += run.last - run.first if run.on_new else 0
        return here


@dataclass(slots=True, eq=False)
class _Request(Waiting):
    layer_ns: int = 1


Planner = Callable[[int, int, Sequence[tuple[int, int, int]]], Mapping[int, int]]
"""(now, when Old is free, [(order, layer_ns, done)]) to targets by order."""


@dataclass(slots=True)
class _Model:
    pair: Pair
    policy: Policy
    planner: Planner | None
    targets: Mapping[int, int]
    now: int = 0
    arrived: int = 0
    ended: int = 0
    waiting: list[_Request] = field(default_factory=list)
    new: _Request | None = None
    last_new: _Request | None = None
    old: _Request | None = None
    new_until: int = 0
    old_until: int = 0
    new_from: int = 0
    old_from: int = 0
    idle_from: int | None = None
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        self.new_until, self.old_until = self.pair.new_free_ns, self.pair.old_free_ns
        done = [one.done for one in self.pair.arrivals]
        self.outcome = Outcome([0] * len(done), [])

    @property
    def ready(self) -> int:
        return sum(at <= self.now for at in self.pair.ready_ns)

    def run(self) -> Outcome:
        while self.ended < len(self.pair.arrivals):
            self._settle()
            self._plan(self._admit())
            if self.old is None and self.old_until <= self.now:
                self._start_old()
            if self.new is None and self.new_until <= self.now:
                self._start_new()
            if self.ended < len(self.pair.arrivals):
                self.now = self._next_time()
        return self.outcome

    def _plan(self, arrived: bool) -> None:
        first_layer = self.now == self.pair.ready_ns[0]
        if self.planner is None or not (arrived or first_layer):
            return
        if self.waiting and 0 < self.ready < self.pair.layers:
            asked = [(one.order, one.layer_ns, one.done) for one in self.waiting]
            self.targets = self.planner(self.now, max(self.now, self.old_until), asked)

    def _next_time(self) -> int:
        times = [at for at in self.pair.ready_ns if at > self.now]
        times += [at for at in (self.new_until, self.old_until) if at > self.now]
        if self.arrived < len(self.pair.arrivals):
            times.append(self.pair.arrivals[self.arrived].at_ns)
        return max(self.now, min(times)) if times else self.now

    def _settle(self) -> None:
        """What ends now, New's layer before Old's look."""
        new, old = self.new, self.old
        if new is not None and self.new_until <= self.now:
            new.done += 1
            self._record(True, new, new.done - 1, new.done, self.new_from)
            self.new = None
            if new.done == self.pair.layers:
                self._finish(new)
                self.waiting.remove(new)
        if old is not None and self.old_until <= self.now:
            self._record(False, old, old.done, self.pair.layers, self.old_from)
            self._finish(old)
            self.old = None

    def _record(self, on_new: bool, one: _Request, first: int, last: int, begin: int) -> None:
        self.outcome.runs.append(Run(on_new, one.order, first, last, begin, self.now))

    def _finish(self, one: _Request) -> None:
        self.outcome.finish_ns[one.order] = self.now
        self.ended += 1

    def _admit(self) -> bool:
        before = self.arrived
        while self.arrived < len(self.pair.arrivals):
            one = self.pair.arrivals[self.arrived]
            if one.at_ns > self.now:
                break
            self.waiting.append(_Request(self.arrived, one.done, one.layer_ns))
            self.arrived += 1
        return self.arrived > before

    @property
    def _live(self) -> list[_Request]:
        """Those of the waiting that New may hold under its cap."""
        if self.pair.cap is None or self.ready >= self.pair.layers:
            return self.waiting
        return self.waiting[: self.pair.cap(self.now)]

    # -- Old ----------------------------------------------------------------------------

    def _start_old(self) -> None:
        taken = self._for_old()
        loading = self.ready < self.pair.layers
        if taken is None:
            if self.waiting and loading and self.old_from and self.idle_from is None:
                self.idle_from = self.now
            return
        if self.idle_from is not None:
            self.outcome.stall_ns += self.now - self.idle_from
        self.idle_from = None
        self.outcome.early += taken.done < self.targets.get(taken.order, 0)
        self.waiting.remove(taken)
        self.old, self.old_from = taken, self.now
        self.old_until = self.now + (self.pair.layers - taken.done) * taken.layer_ns

    def _for_old(self) -> _Request | None:
        layers = self.pair.layers
        if self.policy is Policy.ILP_FREE or self.policy is Policy.ILP:
            return next_for_old(self.waiting, self.new, self.ready, layers, self.targets)
        return best_effort_for_old(self.waiting, self.new)

    # -- New ----------------------------------------------------------------------------

    def _start_new(self) -> None:
        taken = self._for_new()
        if taken is not None:
            self.new = self.last_new = taken
            self.new_from = self.now
            self.new_until = self.now + taken.layer_ns

    def _for_new(self) -> _Request | None:
        layers, ready = self.pair.layers, self.ready
        if self.policy is Policy.STOP_THE_WORLD:
            ready = ready if ready == layers else 0
        elif self.policy is Policy.BEST_EFFORT:
            return best_effort_on_new(self._live, self.last_new, ready, layers)
        return next_on_new(self._live, ready, layers, self.targets)


def simulate(
    pair: Pair,
    policy: Policy = Policy.ILP_FREE,
    planner: Planner | None = None,
    targets: Mapping[int, int] = NO_TARGETS,
) -> Outcome:
    """Runs all requests to their end. `planner` is asked for targets when the first layer is
    there and at every arrival from then to the end of the load; `targets` hold from the
    beginning."""
    return _Model(pair, policy, planner, targets).run()
