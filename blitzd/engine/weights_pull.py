"""The target's side of a weight transfer: asks its peers, nearest first, until all is there.

What has arrived is never asked for again. When a peer dies, stalls or turns out to have
damaged bytes, the next one gives what is missing: so a chain heals around a dead node, which
its own successor alone has to notice.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from blitzd.engine.layout import Section
from blitzd.engine.sources import Sources
from blitzd.engine.weights_filling import Damaged, Filling
from blitzd.engine.weights_lane import Lane, Means
from blitzd.engine.weights_peers import Plan, Share
from blitzd.fabric import Identity, UcxFabric
from blitzd.proto.blitzd.engine import v1 as pb

log = structlog.get_logger()


class WeightPull:
    """One load from peers."""

    def __init__(
        self,
        filling: Filling,
        plan: Plan,
        here: Identity,
        ucx: UcxFabric,
        sources: Sources,
        deadline: float,
        floor_s: float = 0.0,
    ) -> None:
        """`here` is this worker. `deadline` is a time of `time.monotonic()`; all of it takes
        `floor_s` at least, and each layer its part of that."""
        self._filling = filling
        self._floor_s = floor_s
        self._began = time.monotonic()
        self._plan = plan
        self._means = Means(filling, plan, ucx, sources, deadline)
        self._lanes = [Lane(share, self._means) for share in plan.shares(filling.size, here)]
        filling.source = plan.peers[0].identity.replica

    @property
    def taken(self) -> dict[str, int]:
        """Bytes that each peer has brought."""
        return self._means.taken

    async def run(self, tell: Callable[[pb.LoadProgress], None]) -> None:
        """Returns when the filling is complete, telling the watermark on the way.

        Raises PeerLost when no peer can bring the rest, Corrupt when none has it undamaged,
        TimeoutError. What had arrived stays.
        """
        try:
            while not self._filling.complete:
                try:
                    await self._bring(tell)
                except Damaged as error:
                    await self._make_up_for(error)
        finally:
            self._means.close()

    async def _bring(self, tell: Callable[[pb.LoadProgress], None]) -> None:
        works = [asyncio.create_task(self._filling.check(tell, self._due))]
        works += [asyncio.create_task(lane.run()) for lane in self._lanes]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for work in works:
                work.cancel()
            await asyncio.wait(works)
        for work in works:
            if not work.cancelled():
                work.result()

    def _due(self, share: float) -> float:
        return self._began + self._floor_s * share - time.monotonic()

    async def _make_up_for(self, error: Damaged) -> None:
        """Raises it when nobody is left who may have better bytes."""
        self._filling.rewind(error.section)
        log.error("damaged weights", peers=sorted(error.owners), error=str(error))
        if len(error.owners) > 1:
            # One of them is to blame: all of it from one shows whether that one is.
            await self._whole(error.section).run()
            return
        for lane in self._lanes:
            lane.drop(*error.owners)
            if not lane.has_peers and self._filling.coverage.missing(*lane.range):
                raise error

    def _whole(self, section: Section) -> Lane:
        range_ = (section.offset, section.offset + section.length)
        return Lane(Share(range_, self._plan.peers), self._means)
