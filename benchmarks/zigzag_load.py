"""One load of `bench_zigzag` under one policy: what the daemon would do, and what was seen."""

import asyncio
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from benchmarks.zigzag_world import BLOCKS, LAYER_S, LAYERS, World, unload
from blitzd.proto.blitzd.engine import v1 as pb
from blitzd.sched.pair_model import Outcome, Run
from blitzd.sched.zigzag import Policy, pending_cap
from blitzd.sim.zigzag import RecordedPair, RecordedRequest
from tests.engine.local_replica import request
from tests.engine.test_live_pairs import follow
from tests.engine.workers import ANSWER_S, Client

PROMPT = "x" * 60
LIMIT_S = 60.0
QUEUED = 2
"""At a replica that runs one request at a time, so that it need not wait for the next."""


@dataclass
class Seen:
    """One load. Times in s since it began; requests by place in order of arrival."""

    arrivals: list[float] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    ready: dict[int, float] = field(default_factory=dict)
    """When New had so many layers; 0: the embedding."""
    layer_s: dict[int, float] = field(default_factory=dict)
    """What a layer took on Old, of the requests that ended there."""
    runs: list[Run] = field(default_factory=list)

    @property
    def ttft(self) -> list[float]:
        return [self.ends[n] - at for n, at in enumerate(self.arrivals)]

    @property
    def loaded(self) -> float:
        return self.ready[LAYERS]

    @property
    def completed(self) -> int:
        return sum(end <= self.loaded for end in self.ends.values())

    @property
    def outcome(self) -> Outcome:
        """As the model would have it."""
        return Outcome([_ns(self.ends[n]) for n in range(len(self.arrivals))], self.runs)

    def recorded(self) -> RecordedPair:
        usual = statistics.median(self.layer_s.values()) if self.layer_s else LAYER_S
        layers = [self.layer_s.get(n, usual) for n in range(len(self.arrivals))]
        return RecordedPair(
            pair=1,
            ready_ns=tuple(_ns(self.ready[layer]) for layer in range(1, LAYERS + 1)),
            requests=[
                RecordedRequest(_ns(at), _ns(layer_s))
                for at, layer_s in zip(self.arrivals, layers, strict=True)
            ],
            embedding_ns=_ns(self.ready[0]),
        )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Load:
    def __init__(self, world: World, policy: Policy, times: list[float], first_id: int) -> None:
        """Requests arrive at `times`, in s since the load begins."""
        self.seen = Seen()
        self._world = world
        self._policy = policy
        self._times = times
        self._first_id = first_id
        self._new, self._old = world.pairs[policy]
        self._at: dict[int, Client] = {}
        self._queue: deque[int] = deque()
        self._moved = asyncio.Event()
        self._following: asyncio.Task[pb.FollowLiveReply] | None = None

    async def run(self) -> Seen:
        for client in (self._new, self._old):
            client.reported = lambda report, client=client: self._hear(client, report)
        async with asyncio.timeout(LIMIT_S), self._world.weights.open() as peer:
            self._began = time.monotonic()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._bring(peer))
                    tasks.create_task(self._arrive())
                    tasks.create_task(self._serve())
            finally:
                if self._following is not None:
                    self._following.cancel()
                    await asyncio.gather(self._following, return_exceptions=True)
                for client in (self._new, self._old):
                    client.reported = lambda report: None
        for on_new, client in ((True, self._new), (False, self._old)):
            self.seen.runs += self._runs(on_new, client)
        await self._release(self._old)
        await unload(self._new)
        return self.seen

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    @property
    def _loaded(self) -> bool:
        return LAYERS in self.seen.ready

    @property
    def _live(self) -> bool:
        return self._policy is not Policy.STOP_THE_WORLD

    async def _bring(self, peer: pb.WeightPeer) -> None:
        """New's load. The last layer is there when the whole model is."""
        call = pb.LoadModelRequest(
            model_path=str(self._world.hollow), blocks_total=BLOCKS, peers=[peer], live=True
        )
        async for progress in self._new.stub.load_model(call):
            layers = progress.layers_ready
            if not self.seen.ready and self._live:
                self._following = follow(self._old, self._new, self._world.transport)
            if layers < LAYERS or progress.digest:
                for layer in range(len(self.seen.ready), layers + 1):
                    self.seen.ready[layer] = self._now
            self._moved.set()

    async def _arrive(self) -> None:
        for number, at in enumerate(self._times):
            await asyncio.sleep(max(0.0, at - self._now))
            self.seen.arrivals.append(self._now)
            self._queue.append(number)
            self._moved.set()

    def _hear(self, client: Client, report: pb.StepReport) -> None:
        assert not report.failed_ids, report.errors
        for request_id in report.relayed_ids:
            if (number := request_id - self._first_id) in self._at:
                self._at[number] = self._old
        for request_id in report.request_ids:
            number = request_id - self._first_id
            self.seen.ends[number] = self._now
            self._at.pop(number, None)
            if client is self._old:
                layers = LAYERS - client.relayed.get(request_id, 0)
                self.seen.layer_s[number] = report.step_ns / 1e9 / layers
        self._moved.set()

    # -- what the daemon decides --------------------------------------------------------

    async def _serve(self) -> None:
        while len(self.seen.ends) < len(self._times):
            self._moved.clear()
            while self._queue and (client := self._place()) is not None:
                number = self._queue.popleft()
                self._at[number] = client
                one = request(self._first_id + number, PROMPT, 1)
                await client.prefill(one, hold=True)
            await self._moved.wait()
        if self._following is not None:
            reply = await self._following
            assert not reply.fault, reply

    def _place(self) -> Client | None:
        on_new, on_old = (
            sum(at is one for at in self._at.values()) for one in (self._new, self._old)
        )
        if not self._live:
            # A second one there only while the other replica will not run out of requests.
            room = QUEUED if not self._loaded or len(self._queue) > 1 else 1
            if self._loaded and on_new < room and on_new <= on_old:
                return self._new
            return self._old if on_old < room else None
        if not self.seen.ready:
            return self._old if not on_old else None
        if not self._loaded:
            return self._new if on_new < pending_cap(_ns(self._now)) else None
        if not on_new:
            return self._new
        # What waits behind New's head is what Old takes.
        return self._old if not on_old and on_new == 1 else None

    def _runs(self, on_new: bool, client: Client) -> list[Run]:
        began = _ns(self._began)
        return [
            Run(on_new, number, first, last, begin - began, end - began)
            for request_id, first, last, begin, end in self._world.steps(client)
            if 0 <= (number := request_id - self._first_id) < len(self._times)
        ]

    async def _release(self, client: Client) -> None:
        held = (await client.holdings()).request_ids
        await client.stub.release_kv(pb.ReleaseKvRequest(request_ids=held), timeout=ANSWER_S)
